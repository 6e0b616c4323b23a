"""An oracle from outside: the Untied Transformer++ is `transformers`' Llama with the same weights."""

from __future__ import annotations

import pytest
import torch

from tangolm.models import build_model
from tests.models.tiny import assert_equal, livelier, tiny, tokens


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of another library's import are not ours
@pytest.mark.parametrize("impl", ["sdpa", "reference"])
def test_untied_equals_llama(impl: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = tiny("untied", depth=3)
    ours = livelier(build_model(config, seed=0, impl=impl))
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            intermediate_size=config.gated_width,
            num_hidden_layers=config.depth,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            head_dim=config.head_width,
            max_position_embeddings=config.context,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
            tie_word_embeddings=True,
            attention_bias=False,
            mlp_bias=False,
        )
    )
    names = {
        "attention_norm": "input_layernorm",
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "attention_output": "self_attn.o_proj",
        "feed_forward_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
    pairs = {"embedding": "model.embed_tokens", "norm": "model.norm"}
    for n in range(config.depth):
        pairs |= {f"blocks.blocks.{n}.{own}": f"model.layers.{n}.{other}" for own, other in names.items()}
    assert {f"{own}.weight" for own in pairs} == set(dict(ours.named_parameters()))
    with torch.no_grad():
        for own, other in pairs.items():
            theirs.get_parameter(f"{other}.weight").copy_(ours.get_parameter(f"{own}.weight"))

    ids = tokens(2, 40)
    out, expected = ours(ids, labels=ids, return_logits=True), theirs(input_ids=ids, labels=ids)
    assert_equal(out.logits.detach(), expected.logits.detach())
    assert_equal(out.loss.detach(), expected.loss.detach())
    out.loss.backward()
    expected.loss.backward()
    for own, other in pairs.items():
        assert_equal(ours.get_parameter(f"{own}.weight").grad, theirs.get_parameter(f"{other}.weight").grad)

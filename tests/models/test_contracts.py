"""What every architecture promises, over all of them and over their implementations."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tangolm.models import LanguageModel, build_model, load_model, preset, preset_names, save_model, supervised
from tests.models.tiny import CONTEXT, EVERY, VOCABULARY, assert_equal, build, livelier, tiny, tokens

families = pytest.mark.parametrize("family", EVERY)
# What takes seconds a family: two of them in `make check`, all in `make test`.
QUICK = ("tango", "loop")
heavy = [family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in EVERY]
implementations = pytest.mark.parametrize(
    ("family", "impl"), [(family, impl) for family in EVERY for impl in ("auto", "reference")]
)


@implementations
def test_causality(family: str, impl: str) -> None:
    model = livelier(build(family, impl))
    ids = tokens(2, 24)
    changed = ids.clone()
    changed[:, 11] = (changed[:, 11] + 1) % VOCABULARY
    with torch.no_grad():
        before, after = model(ids).logits, model(changed).logits
    assert torch.equal(before[:, :11], after[:, :11])
    differs = (before[:, 11:] != after[:, 11:]).any(-1)
    assert differs.all(), "a later token does not see token 11"


@implementations
@pytest.mark.case(7)
@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 19])
def test_token_by_token_equals_full(family: str, impl: str, length: int) -> None:
    model = livelier(build(family, impl))
    ids = tokens(2, length)
    with torch.no_grad():
        full = model(ids).logits
        cache = model.new_cache(2)
        steps = [model(ids[:, t : t + 1], cache=cache).logits for t in range(length)]
    assert cache.length == length
    assert_equal(torch.cat(steps, 1), full)


@implementations
@pytest.mark.case(8)
def test_pieces_equal_full(family: str, impl: str) -> None:
    model = livelier(build(family, impl))
    ids = tokens(2, 14)
    with torch.no_grad():
        full = model(ids).logits
        cache = model.new_cache(2)
        pieces = [model(piece, cache=cache).logits for piece in ids.split([10, 3, 1], dim=1)]
    assert_equal(torch.cat(pieces, 1), full)


@families
def test_pieces_with_documents_equal_full(family: str) -> None:
    model = livelier(build(family))
    ids, documents = tokens(1, 14), torch.tensor([[0] * 4 + [1] * 7 + [3] * 3])
    with torch.no_grad():
        full = model(ids, document_ids=documents).logits
        cache = model.new_cache(1)
        cuts = [6, 5, 3]
        pieces = [
            model(piece, document_ids=document, cache=cache).logits
            for piece, document in zip(ids.split(cuts, 1), documents.split(cuts, 1), strict=True)
        ]
    assert_equal(torch.cat(pieces, 1), full)


@families
def test_reordered_cache(family: str) -> None:
    model = livelier(build(family))
    ids, mask = tokens(3, 9), torch.ones(3, 9, dtype=torch.bool)
    mask[1, :4] = False
    rows = torch.tensor([2, 1, 1, 0])
    with torch.no_grad():
        cache = model.new_cache(3)
        model(ids[:, :8], attention_mask=mask[:, :8], cache=cache)
        cache.reorder(rows)
        step = model(ids[rows, 8:], cache=cache).logits
        full = model(ids, attention_mask=mask).logits[rows, 8:]
    assert_equal(step, full)


@families
def test_cache_is_for_inference(family: str) -> None:
    model = build(family)
    with pytest.raises(ValueError, match=r"torch\.no_grad"):
        model(tokens(1, 3), cache=model.new_cache(1))
    with torch.no_grad(), pytest.raises(ValueError, match="cache is for 2 rows"):
        model(tokens(1, 3), cache=model.new_cache(2))
    for size in (0, -1, 1.5):
        with pytest.raises(ValueError, match="batch_size must be a whole number"):
            model.new_cache(size)
    with torch.no_grad(), pytest.raises(ValueError, match="cache must come from new_cache, got dict"):
        model(tokens(1, 3), cache={})


@families
def test_a_cache_of_another_model_is_refused_unchanged(family: str) -> None:
    model, other = build(family), build(family, depth=4)
    ids = tokens(1, 6)
    with torch.no_grad():
        cache = other.new_cache(1)
        other(ids[:, :5], cache=cache)
        with pytest.raises(ValueError, match="cache is of another model"):
            model(ids[:, 5:], cache=cache)
        assert cache.length == 5
        assert_equal(other(ids[:, 5:], cache=cache).logits, other(ids).logits[:, 5:])


def greedy(model: LanguageModel, ids: torch.Tensor, mask: torch.Tensor | None, count: int) -> torch.Tensor:
    with torch.no_grad():
        cache = model.new_cache(ids.shape[0])
        out = [model(ids, attention_mask=mask, cache=cache).logits[:, -1].argmax(-1, keepdim=True)]
        for _ in range(count - 1):
            out.append(model(out[-1], cache=cache).logits[:, -1].argmax(-1, keepdim=True))
    return torch.cat(out, 1)


@implementations
@pytest.mark.case(1)
def test_left_padded_batch(family: str, impl: str) -> None:
    model = livelier(build(family, impl))
    short, long = tokens(1, 3, seed=1), tokens(1, 9, seed=2)
    ids = torch.cat([torch.cat([torch.zeros(1, 6, dtype=torch.long), short], 1), long])
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :6] = 0
    with torch.no_grad():
        padded = model(ids, attention_mask=mask).logits
        assert_equal(padded[:1, 6:], model(short).logits)
        assert_equal(padded[1:], model(long).logits)
    together = greedy(model, ids, mask, 20)
    assert torch.equal(together[:1], greedy(model, short, None, 20))
    assert torch.equal(together[1:], greedy(model, long, None, 20))


@implementations
@pytest.mark.case(2)
def test_batch_of_one_behind_pads(family: str, impl: str) -> None:
    model = livelier(build(family, impl))
    ids = tokens(1, 4)
    padded = torch.cat([torch.full((1, 5), 3), ids], 1)
    mask = torch.tensor([[0] * 5 + [1] * 4])
    with torch.no_grad():
        assert_equal(model(padded, attention_mask=mask).logits[:, -1], model(ids).logits[:, -1])


def embedded_gradient(
    model: LanguageModel, ids: torch.Tensor, **inputs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and its gradient with respect to the embedded inputs."""
    kept: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, args: object, output: torch.Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    handle = model.embedding.register_forward_hook(keep)
    loss = model(ids, labels=ids, **inputs).loss
    assert loss is not None
    loss.backward()
    handle.remove()
    assert kept[0].grad is not None
    return loss.detach(), kept[0].grad


@implementations
@pytest.mark.case(3)
def test_padding_gets_no_gradient(family: str, impl: str) -> None:
    model = livelier(build(family, impl))
    ids = tokens(1, 11)
    mask = torch.tensor([[0] * 5 + [1] * 11])
    loss, alone = embedded_gradient(model, ids)
    padded_loss, padded = embedded_gradient(model, torch.cat([torch.full((1, 5), 7), ids], 1), attention_mask=mask)
    assert (padded[:, :5] == 0).all()
    assert_equal(padded[:, 5:], alone)
    assert_equal(padded_loss, loss)


@implementations
@pytest.mark.case(4)
def test_a_row_of_padding(family: str, impl: str) -> None:
    model = livelier(build(family, impl))
    ids = tokens(3, 10)
    mask = torch.ones(3, 10, dtype=torch.bool)
    mask[1] = False
    out = model(ids, labels=ids, attention_mask=mask, return_logits=True)
    out.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    with torch.no_grad():
        rows = model(ids[[0, 2]], labels=ids[[0, 2]], return_logits=True)
    assert out.logits.isfinite().all()
    assert_equal(out.logits[[0, 2]].detach(), rows.logits)
    assert_equal(out.loss.detach(), rows.loss)
    nothing = model(ids, labels=ids, attention_mask=torch.zeros(3, 10, dtype=torch.bool)).loss
    assert nothing == 0


@implementations
@pytest.mark.case(5)
def test_packed_equals_separate(family: str, impl: str) -> None:
    model = livelier(build(family, impl))
    pieces = [tokens(1, length, seed=length) for length in (5, 1, 21)]
    documents = torch.cat([torch.full((1, piece.shape[1]), i) for i, piece in enumerate(pieces)], 1)
    row = torch.cat(pieces, 1)

    with torch.no_grad():
        packed = model(row, document_ids=documents).logits
        separate = torch.cat([model(piece).logits for piece in pieces], 1)
    assert_equal(packed, separate)

    _, gradient = embedded_gradient(model, row, document_ids=documents)
    weights = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    counts = [piece.shape[1] - 1 for piece in pieces]
    parts = []
    for piece, count in zip(pieces, counts, strict=True):
        kept: list[torch.Tensor] = []
        handle = model.embedding.register_forward_hook(
            lambda m, a, out, kept=kept: (out.retain_grad(), kept.append(out))[0]
        )
        (model(piece, labels=piece).loss * count / sum(counts)).backward()
        handle.remove()
        parts.append(kept[0].grad)
    assert_equal(gradient, torch.cat(parts, 1))
    for name, parameter in model.named_parameters():
        assert_equal(weights[name], parameter.grad)


@families
@pytest.mark.case(6)
@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([[0, 1, 0, 1]], "must not decrease"),
        ([[0, 0, 1]], r"must be \[1, 4\]"),
        ([[0.0, 0.0, 1.0, 1.0]], "whole numbers"),
    ],
)
def test_documents_that_do_not_fit(family: str, documents: list, message: str) -> None:
    model = build(family)
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: pytest.fail("work was done before the check"))
    with pytest.raises(ValueError, match=message):
        model(tokens(1, 4), document_ids=torch.tensor(documents))


@families
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": torch.full((1, 4), VOCABULARY)}, "holds 97, outside the vocabulary of 97"),
        ({"input_ids": torch.full((1, 4), -1)}, "holds -1"),
        ({"input_ids": torch.zeros(4, dtype=torch.long)}, r"\[B, T\]"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "T at least 1"),
        ({"input_ids": tokens(1, 4), "labels": tokens(1, 3)}, "aligned"),
        ({"input_ids": tokens(1, 4), "attention_mask": torch.ones(1, 5)}, r"attention_mask must be \[1, 4\]"),
    ],
)
def test_bad_input_is_named(family: str, inputs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(family)(**inputs)


@families
def test_rows_of_a_batch_are_independent(family: str) -> None:
    model = livelier(build(family))
    ids = tokens(4, 33)
    with torch.no_grad():
        together = model(ids).logits
        alone = torch.cat([model(row[None]).logits for row in ids])
    assert_equal(together, alone)


@families
def test_every_field_changes_something(family: str) -> None:
    config = tiny(family, vocab_multiple=3)
    other = {
        "vocab_size": 90,
        "context": 65,
        "depth": config.depth + 1,
        "looped": not config.looped,
        "width": 128,
        "gated_width": 96,
        "head_width": 16,
        "vocab_multiple": 8,
        "norm_eps": 1e-2,
        "init_std": 0.05,
        "rope_base": 50.0,
        "initial_temperature": 3.0,
        "segments": 2,
        "sets": 2,
        "set_schedule": (1, 0, 2) if family == "tango-3-sets" else (0, 1),
        "controller_width": 16,
        "shared_width": 8,
        "group": 4,
        "window": 5,
        "features": "none",
        "feature_count": 32,
    }
    ids = tokens(1, 40) % 90

    def facts(config: object) -> tuple:
        model = build_model(config, seed=0)
        with torch.no_grad():
            logits = model(ids).logits
        return (config.parameters(), config.macs(), model.embedding.weight.shape, logits.sum().item())

    base = facts(config)
    names = [field.name for field in dataclasses.fields(config) if field.name != "architecture"]
    for name in names:
        try:
            changed = dataclasses.replace(config, **{name: other[name]})
        except ValueError as error:
            if name not in str(error):
                raise
            continue  # refused by name, such as a schedule of two sets where there is one
        assert facts(changed) != base, f"{name} changes nothing"


REFUSED = [
    ("depth", 0),
    ("vocab_size", 0),
    ("width", 0),
    ("width", 65),  # no multiple of head_width
    ("head_width", 5),
    ("norm_eps", 0.0),
    ("init_std", -1.0),
    ("context", -3),
    ("rope_base", 0.0),
    ("shared_width", 0),
    ("group", 0),
]


def has(family: str, field: str) -> bool:
    return field in {each.name for each in dataclasses.fields(tiny(family))}


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        (family, field, value)
        for family in EVERY
        for field, value in REFUSED
        if has(family, field) and (value != 65 or has(family, "head_width"))
    ],
)
def test_refused_values_name_the_field(family: str, field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        tiny(family, **{field: value})


@pytest.mark.parametrize("family", heavy)
def test_saved_equals_loaded_in_a_new_process(family: str, tmp_path) -> None:
    model = build(family, seed=5)
    ids = tokens(1, 12)
    with torch.no_grad():
        logits = model(ids).logits
    save_model(model, tmp_path / "model")
    program = f"""
import torch, tangolm
from safetensors.torch import save_file
torch.set_num_threads(1)  # as here: another number of threads adds in another order
model = tangolm.load_model({str(tmp_path / "model")!r})
with torch.no_grad():
    logits = model(torch.tensor({ids.tolist()})).logits
    model.embedding.weight.mul_(2)
    tied = model(torch.tensor({ids.tolist()})).logits
save_file({{"logits": logits, "tied": tied}}, {str(tmp_path / "out.safetensors")!r})
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    from safetensors.torch import load_file

    out = load_file(tmp_path / "out.safetensors")
    assert torch.equal(out["logits"], logits)
    assert_equal(out["tied"].norm() / logits.norm(), torch.tensor(2.0), 0.5)  # the head moved with the embedding
    assert load_model(tmp_path / "model").config == model.config


@pytest.mark.parametrize("name", preset_names())
def test_parameters_equal_formula(name: str) -> None:
    config = preset(name)
    with torch.device("meta"):
        model = build_model_on_meta(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted == config.parameters()["total"]
    assert counted - model.embedding.weight.numel() == config.parameters()["non_embedding"]


def build_model_on_meta(config: object) -> LanguageModel:
    from tangolm.models import MODELS

    return LanguageModel(config, MODELS[config.architecture][1])


@families
@pytest.mark.parametrize("looped", [True, False])
def test_operations_equal_counted(family: str, looped: bool) -> None:
    try:
        config = tiny(family, depth=3, looped=looped, vocab_multiple=64)
    except ValueError as error:
        assert "looped" in str(error)  # noqa: PT017  several sets are of looped models only
        return
    model = build_model(config, impl="reference")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens(1, CONTEXT))
    assert counter.get_total_flops() == 2 * config.macs()["macs"]
    assert config.macs(7)["macs"] < config.macs()["macs"]
    assert config.macs()["useful_macs"] < config.macs()["macs"]


@families
@pytest.mark.case(34)
def test_padded_vocabulary(family: str) -> None:
    model = build(family, vocab_multiple=128)
    assert model.embedding.weight.shape[0] == 128
    ids = tokens(4, 64)
    out = model(ids, labels=ids, return_logits=True)
    assert out.logits.shape[-1] == VOCABULARY
    assert abs(out.loss.item() - torch.tensor(float(VOCABULARY)).log().item()) < 0.1


@pytest.mark.parametrize(
    ("family", "backend"),
    [pytest.param(family, "aot_eager", marks=() if family in QUICK else pytest.mark.slow) for family in EVERY]
    + [pytest.param(family, "inductor", marks=pytest.mark.slow) for family in ("tango", "windowed-tango", "loop")],
)
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own
def test_compiled_equals_eager(family: str, backend: str) -> None:
    torch._dynamo.reset()
    model = livelier(build(family))
    ids, documents = tokens(2, 24), torch.arange(24).div(7, rounding_mode="floor").expand(2, 24)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for inputs in ({}, {"document_ids": documents}, {"attention_mask": documents > 0}):
        model.zero_grad()
        eager = model(ids, labels=ids, **inputs).loss
        eager.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        fast = compiled(ids, labels=ids, **inputs).loss
        fast.backward()
        assert_equal(fast.detach(), eager.detach())
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert_equal(parameter.grad, gradient)


@pytest.mark.parametrize("family", heavy)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_learns_to_copy(family: str, precision: str) -> None:
    """Random halves repeated: the second half can only be predicted by looking back."""
    torch.manual_seed(0)
    model = build(family, gated_width=256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(200):
        half = torch.randint(0, 16, (16, 5), generator=generator)
        ids = torch.cat([half, half], 1)
        labels = ids.clone()
        labels[:, :5] = -100
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = model(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    # Half of what guessing among the 16 tokens gives.
    assert losses[-1] < math.log(16) / 2, f"{losses[0]:.3f} -> {losses[-1]:.3f}"


@families
def test_score_equals_loss(family: str) -> None:
    model = build(family)
    ids = tokens(3, 20)
    labels, mask = ids.clone(), torch.ones(3, 20, dtype=torch.bool)
    labels[:, :6] = -100
    mask[1, :9] = False
    documents = torch.arange(20).div(8, rounding_mode="floor").expand(3, 20)
    score = model.score(ids, labels, mask, documents, block=7)
    assert torch.equal(score.counted, supervised(labels, mask, documents))
    loss = model(ids, labels=labels, attention_mask=mask, document_ids=documents).loss
    assert_equal(score.nll.sum() / score.counted.sum(), loss.detach())
    with torch.no_grad():
        predicted = model(ids, attention_mask=mask, document_ids=documents).logits[:, :-1].argmax(-1)
    assert torch.equal(score.correct, (predicted == ids[:, 1:]) & score.counted)
    assert (score.nll[~score.counted] == 0).all()

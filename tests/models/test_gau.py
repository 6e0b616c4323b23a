"""GAU against the loop-written equations, its blocked form, its limit and its counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tangolm.models import build_model, preset, training_memory_bytes
from tangolm.models.cache import layout_of
from tangolm.models.gated_unit import GatedUnit
from tangolm.models.gau import IMPLS
from tests.models.gated_loop import assert_same, block_of, packed, padded, plain, random_rows
from tests.models.tiny import assert_equal, build, livelier, tiny, tokens

impls = pytest.mark.parametrize("impl", sorted(IMPLS))


def attention(block: GatedUnit, context: int):
    """A v of a destination from the equation."""

    def attend(document: list[dict[str, Tensor]], i: int) -> Tensor:
        total = torch.zeros_like(document[i]["v"])
        for j in range(i + 1):
            score = document[i]["0"] @ document[j]["1"] / context + block.distance_bias[context - 1 + i - j]
            total = total + score.clamp(min=0) ** 2 * document[j]["v"]
        return total

    return attend


@impls
@pytest.mark.case(15)
@pytest.mark.parametrize("length", [1, 2, 15, 16])
def test_block_equals_loop(impl: str, length: int) -> None:
    block = block_of("gau", impl, context=16, shared_width=4)
    assert_same(block, plain(length), tiny("gau", context=16, shared_width=4), attention(block, 16))


@impls
@pytest.mark.parametrize(
    "rows",
    [
        [packed(5, 1, 21)],
        [packed(27), packed(1, 1, 25)],
        [padded(9, [0, 1, 2]), padded(9, [7, 8]), padded(9, [3, 5])],
        [padded(6, list(range(6))), padded(6, [])],
        *(random_rows(3, 20, seed) for seed in range(4)),
    ],
    ids=lambda rows: f"{len(rows)}x{len(rows[0][0])}",
)
def test_documents_and_padding_equal_loop(impl: str, rows: list) -> None:
    block = block_of("gau", impl, context=27, shared_width=4)
    assert_same(block, rows, tiny("gau", context=27, shared_width=4), attention(block, 27))


@pytest.mark.parametrize(("length", "sources"), [(63, 63), (64, 64), (65, 65), (300, 300), (2, 5), (130, 260)])
@pytest.mark.parametrize("kind", ["plain", "documents", "mask", "both"])
def test_blocked_equals_reference(length: int, sources: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    context = 300
    operands = [draw(2, length, 4), draw(2, sources, 4), draw(2, sources, 5), draw(2 * context - 1)]
    rows = random_rows(2, sources, seed=2)
    documents = torch.tensor([row[0] for row in rows]) if kind in ("documents", "both") else None
    mask = torch.tensor([row[1] for row in rows]) if kind in ("mask", "both") else None
    positions = None
    if mask is not None:
        before = mask.long().cumsum(1) - mask.long()
        first = before.clone()
        for b in range(2):
            for t in range(1, sources):
                if documents is None or documents[b, t] == documents[b, t - 1]:
                    first[b, t] = first[b, t - 1]
        positions = before - first
    upstream = draw(2, length, 5)
    results = []
    for impl in ("reference", "blocked"):
        leaves = [x.clone().requires_grad_() for x in operands]
        out = IMPLS[impl](*leaves, documents, mask, positions)
        out.backward(upstream)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for got, expected in zip(results[1], results[0], strict=True):
        assert_equal(got, expected, 1e-12)
    assert results[0][4].abs().max() > 0


def test_only_the_causal_half_of_the_bias_is_used() -> None:
    model = livelier(build("gau"))
    model(tokens(2, 64)).logits.square().sum().backward()
    for block in model.blocks:
        gradient = block.distance_bias.grad
        assert gradient.shape == (127,)
        assert (gradient[:63] == 0).all()
        assert (gradient[63:] != 0).all()


@impls
@pytest.mark.case(13)
def test_more_tokens_than_the_context(impl: str) -> None:
    model = build("gau", impl)
    with pytest.raises(ValueError, match=r"65 tokens.*context of 64"):
        model(tokens(1, 65))
    with torch.no_grad():
        cache = model.new_cache(1)
        model(tokens(1, 60), cache=cache)
        with pytest.raises(ValueError, match=r"65 tokens.*context of 64"):
            model(tokens(1, 5), cache=cache)
        after = model(tokens(1, 4, seed=1), cache=cache).logits  # the refused call left the cache as it was
        whole = model(torch.cat([tokens(1, 60), tokens(1, 4, seed=1)], 1)).logits
        assert_equal(after, whole[:, -4:])
        with pytest.raises(ValueError, match=r"65 tokens.*context of 64"):
            model(tokens(1, 1), cache=cache)


@impls
@pytest.mark.parametrize("rope_base", [None, 100.0])
def test_steps_and_pieces_equal_full_up_to_the_context(impl: str, rope_base: float | None) -> None:
    model = livelier(build("gau", impl, rope_base=rope_base))
    ids = tokens(2, 64)
    for seed in range(2):
        rows = random_rows(2, 64, seed)
        documents, mask = (torch.tensor(part) for part in zip(*rows, strict=True))
        for inputs in ({}, {"document_ids": documents}, {"attention_mask": mask, "document_ids": documents}):
            with torch.no_grad():
                full = model(ids, **inputs).logits
                for cuts in ([30, 1, 1, 3, 29], [1] * 64):
                    cache = model.new_cache(2)
                    pieces = []
                    for start, piece in zip(torch.tensor([0, *cuts]).cumsum(0).tolist(), cuts, strict=False):
                        part = {name: x[:, start : start + piece] for name, x in inputs.items()}
                        pieces.append(model(ids[:, start : start + piece], cache=cache, **part).logits)
                    assert_equal(torch.cat(pieces, 1)[mask], full[mask])


def test_rope_is_off_until_a_base_is_given() -> None:
    assert tiny("gau").rope is None
    assert tiny("gau", rope_base=50.0).rope == (16, 50.0)
    with pytest.raises(ValueError, match="shared_width must be even"):
        tiny("gau", rope_base=50.0, shared_width=3)


def test_rope_turns_queries_and_keys() -> None:
    """With RoPE, scores follow the distance: shifting a document by padding changes nothing, shuffling its tokens does."""
    plain_model, turned = (livelier(build("gau", rope_base=base)) for base in (None, 10.0))
    ids = tokens(1, 12)
    with torch.no_grad():
        assert not torch.allclose(plain_model(ids).logits, turned(ids).logits)
        padded_ids = torch.cat([tokens(1, 5, seed=1), ids], 1)
        mask = torch.tensor([[0] * 5 + [1] * 12])
        assert_equal(turned(padded_ids, attention_mask=mask).logits[:, 5:], turned(ids).logits)


@pytest.mark.case(17)
@impls
def test_bfloat16_stays_near(impl: str) -> None:
    model = livelier(build("gau", impl))
    ids = tokens(2, 64)
    with torch.no_grad():
        wide = model(ids).logits
        narrow = model.bfloat16()(ids).logits.float()
    assert (narrow - wide).norm() / wide.norm() < 0.03


def test_nothing_of_size_t_by_t_is_kept() -> None:
    config = tiny("gau", context=512)
    blocked, dense = (training_memory_bytes(config, impl=impl) for impl in ("blocked", "reference"))
    assert dense - blocked >= config.depth * 512 * 512 * 4


def test_operations_of_the_blocked_form_are_counted() -> None:
    config = tiny("gau", vocab_multiple=64)
    counts = []
    for impl in IMPLS:
        model = build_model(config, impl=impl)
        with FlopCounterMode(display=False) as counter:
            model(tokens(1, 64), labels=tokens(1, 64)).loss.backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("family", ["gau", "flash"])
def test_initial_weights_average(family: str) -> None:
    """Without scores the last token of a full context (or group) starts with the plain average of the values."""
    model = build(family)
    block = model.blocks[0]
    assert isinstance(block, GatedUnit)
    kinds = [torch.zeros(1, block.longest, 16)] * (block.scale.shape[0] // 16)
    value = torch.randn(1, block.longest, 5, generator=torch.Generator().manual_seed(0))
    layout = layout_of(tokens(1, block.longest), None, None, None, model.config, torch.float32)
    with torch.no_grad():
        assert_equal(block.attend(kinds, value, layout, None)[:, -1], value.mean(1))


@pytest.mark.parametrize(
    ("tier", "depth", "context", "width"),
    [
        ("70m", 4, 8192, 7136),
        ("70m", 4, 2048, 7152),
        ("70m", 4, 256, 7152),
        ("70m", 8, 8192, 3536),
        ("70m", 8, 2048, 3552),
        ("70m", 8, 256, 3552),
        ("160m", 4, 8192, 13104),
        ("160m", 4, 2048, 13104),  # kept as printed: 13,120 is nearer
        ("160m", 4, 256, 13120),
        ("160m", 8, 8192, 6528),
        ("160m", 8, 2048, 6528),
        ("160m", 8, 256, 6544),
    ],
)
def test_width_follows_the_context(tier: str, depth: int, context: int, width: int) -> None:
    config = preset(f"gau-{tier}-d{depth}", context=context)
    assert (config.gated_width, config.context) == (width, context)
    d, e, s = config.width, width, 128
    expected = depth * (3 * d * e + d * s + 2 * e + s + d + 4 * s + 2 * d + 2 * context - 1) + d
    assert config.parameters()["non_embedding"] == expected


def test_operation_count_of_the_paper() -> None:
    config = preset("gau-70m-d4")
    d, e, s, length = 512, 7136, 128, 8192
    products, head = 4 * length * (3 * d * e + d * s), length * d * 50_257
    assert config.macs()["macs"] == products + 4 * length**2 * (s + e) + head
    assert config.macs()["useful_macs"] == products + 4 * (length * (length + 1) // 2) * (s + e) + head


def test_unknown_implementation() -> None:
    with pytest.raises(ValueError, match="did you mean 'blocked'"):
        build("gau", "block")

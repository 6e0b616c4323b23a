"""FLASH against the loop-written equations, its state of constant size, packing without waste, and its counts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tangolm.models import preset
from tangolm.models.flash import IMPLS, FlashConfig
from tangolm.models.gated_unit import GatedUnit
from tests.models.gated_loop import assert_same, block_of, packed, padded, plain, random_rows
from tests.models.tiny import assert_equal, build, livelier, tiny, tokens

GROUP = 8
CONTEXT = 24
impls = pytest.mark.parametrize("impl", IMPLS)


def attention(block: GatedUnit):
    """What a destination gets, from the equation: near sources by squared ReLU, those of earlier groups linearly."""

    def attend(document: list[dict[str, Tensor]], i: int) -> Tensor:
        total = torch.zeros_like(document[i]["v"])
        for j in range(i + 1):
            if j // GROUP == i // GROUP:
                score = document[i]["0"] @ document[j]["1"] / GROUP + block.distance_bias[GROUP - 1 + i - j]
                total = total + score.clamp(min=0) ** 2 * document[j]["v"]
            else:
                total = total + document[i]["2"] @ document[j]["3"] / CONTEXT * document[j]["v"]
        return total

    return attend


def check(impl: str, rows: list) -> None:
    block = block_of("flash", impl, context=CONTEXT, shared_width=4)
    config = tiny("flash", context=CONTEXT, shared_width=4)
    # Short documents alone have no linear part, so add a row that uses every parameter.
    length = len(rows[0][0])
    if length > GROUP:
        rows = [*rows, plain(length)[0]]
    else:
        block.scale.data[2 * 4 :] = block.offset.data[2 * 4 :] = 0
    assert_same(block, rows, config, attention(block))


@impls
@pytest.mark.case(7)
@pytest.mark.case(15)
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 24, 31])
def test_block_equals_loop(impl: str, length: int) -> None:
    check(impl, plain(length))


@impls
@pytest.mark.case(5)
@pytest.mark.parametrize(
    "rows",
    [
        [packed(5, 1, 21)],
        [packed(8, 8, 11)],
        [packed(7, 9, 11), packed(16, 1, 10)],
        [packed(1, 24, 2), packed(3, 17, 7)],
        [padded(27, [0, 1, 2]), padded(27, list(range(11))), padded(27, [25, 26])],
        [padded(20, [3, 5, 6, 7, 8, 9, 10, 11, 12]), padded(20, list(range(0, 20, 2)))],
        [padded(20, list(range(20))), padded(20, [])],
        [padded(6, [0, 1]), packed(2, 3, 1)],
        *(random_rows(3, 40, seed) for seed in range(6)),
    ],
    ids=lambda rows: f"{len(rows)}x{len(rows[0][0])}",
)
def test_documents_and_padding_equal_loop(impl: str, rows: list) -> None:
    check(impl, rows)


@impls
@pytest.mark.case(8)
@pytest.mark.parametrize("rope_base", [None, 100.0])
@pytest.mark.parametrize("cuts", [[1] * 60, [20, 1, 1, 3, 8, 7, 20], [8, 8, 1, 7, 16, 20], [60]], ids=len)
def test_steps_and_pieces_equal_full(impl: str, rope_base: float | None, cuts: list[int]) -> None:
    """Documents and padding anywhere, so that every row's groups begin elsewhere; the last row is all padding for a while."""
    model = livelier(build("flash", impl, rope_base=rope_base))
    ids = tokens(4, 60)
    rows = [*random_rows(3, 60, seed=len(cuts)), ([0] * 60, [t > 33 for t in range(60)])]
    documents, mask = (torch.tensor(part) for part in zip(*rows, strict=True))
    for inputs in (
        {},
        {"document_ids": documents},
        {"attention_mask": mask},
        {"attention_mask": mask, "document_ids": documents},
    ):
        with torch.no_grad():
            full = model(ids, **inputs).logits
            cache = model.new_cache(4)
            pieces, start = [], 0
            for piece in cuts:
                part = {name: x[:, start : start + piece] for name, x in inputs.items()}
                pieces.append(model(ids[:, start : start + piece], cache=cache, **part).logits)
                start += piece
        assert_equal(torch.cat(pieces, 1)[mask], full[mask])


@pytest.mark.case(1)
def test_rows_cross_group_boundaries_at_their_own_steps() -> None:
    model = livelier(build("flash"))
    pads = [0, 3, 8, 11, 15]
    ids = tokens(len(pads), 40)
    mask = torch.tensor([[t >= pad for t in range(40)] for pad in pads])
    with torch.no_grad():
        cache = model.new_cache(len(pads))
        got = [model(ids[:, :16], attention_mask=mask[:, :16], cache=cache).logits]
        got += [model(ids[:, t : t + 1], cache=cache).logits for t in range(16, 40)]
        for row, pad in enumerate(pads):
            assert_equal(torch.cat(got, 1)[row, pad:], model(ids[row : row + 1, pad:]).logits[0])


def generate(length: int) -> None:
    """A prompt of 6, then pieces and single tokens."""
    model = livelier(build("flash"))
    ids = tokens(2, length)
    with torch.no_grad():
        full = model(ids).logits
        cache = model.new_cache(2)
        got = [model(ids[:, :6], cache=cache).logits]
        size = cache.bytes
        assert size > 0
        for t in range(6, length):
            got.append(model(ids[:, t : t + 1], cache=cache).logits)
            assert cache.bytes == size, "the state grows"
    assert cache.length == length
    assert_equal(torch.cat(got, 1), full)


@pytest.mark.case(11)
def test_state_has_constant_size() -> None:
    generate(150)


@pytest.mark.slow
@pytest.mark.case(11)
def test_no_drift_over_ten_thousand_tokens() -> None:
    generate(10_006)


def test_state_holds_the_sums_and_one_group() -> None:
    config = tiny("flash")
    model = build("flash")
    with torch.no_grad():
        cache = model.new_cache(3)
        assert cache.bytes == 0
        model(tokens(3, 50), cache=cache)
    s, e = config.shared_width, config.gated_width
    assert cache.bytes == config.depth * 3 * (4 * (s * e + GROUP * (2 * s + e)) + 8)


class Largest(TorchDispatchMode):
    """The most numbers in one tensor."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return out


def test_short_documents_waste_no_memory() -> None:
    """A group of 64 for each of 512 documents of one token would be 64 times the row."""
    model = build("flash", group=64, gated_width=96, context=512)
    ids = tokens(1, 512)
    with torch.no_grad(), Largest() as plain_run:
        model(ids)
    with torch.no_grad(), Largest() as packed_run:
        model(ids, document_ids=torch.arange(512)[None])
    assert plain_run.numbers > 0
    assert packed_run.numbers <= 2 * plain_run.numbers


@pytest.mark.case(17)
@impls
def test_bfloat16_stays_near(impl: str) -> None:
    model = livelier(build("flash", impl))
    ids = tokens(2, 64)
    with torch.no_grad():
        wide = model(ids).logits
        narrow = model.bfloat16()(ids).logits.float()
    assert (narrow - wide).norm() / wide.norm() < 0.03


@pytest.mark.parametrize(
    ("name", "width"),
    [("flash-70m-d4", 7152), ("flash-70m-d8", 3552), ("flash-160m-d4", 13120), ("flash-160m-d8", 6544)],
)
@pytest.mark.parametrize("context", [8192, 2048, 256])
def test_widths_of_the_paper(name: str, width: int, context: int) -> None:
    config = preset(name, context=context)
    assert isinstance(config, FlashConfig)
    assert (config.gated_width, config.group) == (width, 256)
    d, e, s = config.width, width, 128
    expected = config.depth * (3 * d * e + d * s + 2 * e + s + d + 8 * s + 2 * d + 2 * 256 - 1) + d
    assert config.parameters()["non_embedding"] == expected


def test_groups_of_the_mini_tier() -> None:
    config = preset("flash-mini-d4")
    assert isinstance(config, FlashConfig)
    assert (config.group, build("flash", group=64).blocks[0].distance_bias.shape) == (64, (127,))


def test_operation_count_of_the_paper() -> None:
    config = preset("flash-70m-d4")
    d, e, s, length = 512, 7152, 128, 8192
    block = length * (3 * d * e + d * s) + 256 * length * (s + e) + 2 * length * s * e
    assert config.macs()["macs"] == 4 * block + length * d * 50_257


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 23, 64])
def test_useful_operations_pair_by_pair(length: int) -> None:
    config = tiny("flash")
    assert isinstance(config, FlashConfig)
    s, e, d = config.shared_width, config.gated_width, config.width
    groups = math.ceil(length / GROUP)
    pairs = sum(1 for i in range(length) for j in range(i + 1) if i // GROUP == j // GROUP)
    summed = sum(1 for j in range(length) if j // GROUP < groups - 1)
    reading = sum(1 for i in range(length) if i // GROUP > 0)
    block = length * (3 * d * e + d * s) + pairs * (s + e) + (summed + reading) * s * e
    assert config.macs(length)["useful_macs"] == config.depth * block + length * d * config.vocab_size
    assert config.macs(length)["useful_macs"] < config.macs(length)["macs"]


def test_unknown_implementation() -> None:
    with pytest.raises(ValueError, match="did you mean 'grouped'"):
        build("flash", "group")

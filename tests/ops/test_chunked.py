"""What is the blocked implementation's alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tangolm.ops import IMPLS, aggregate_gates, tiles
from tangolm.ops.compare import draw
from tangolm.ops.tiles import Tiles


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_operators_are_what_torch_expects(packed: bool, silu: bool) -> None:
    """Schema, shape rules, autograd and compilation, by torch's own check."""
    ids = torch.arange(20).expand(2, -1) // 7 if packed else None
    inputs = draw(2, 20, 2, 3, 4, dtype=torch.float64)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs.differentiable]
    torch.library.opcheck(torch.ops.tangolm.aggregate_gates, (*leaves, ids, None, silu))
    rest = (inputs.grad, *inputs.differentiable, ids, None, silu)
    torch.library.opcheck(torch.ops.tangolm.aggregate_gates_backward, rest)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("strip", [16, 64])
@pytest.mark.parametrize("tile", [1, 8 * 21, 100 * 8 * 21], ids=["a head", "some heads", "whole rows"])
def test_silu_inside_is_silu_before(packed: bool, tile: int, strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients, whatever heads a group holds; and what is kept is the operand, not its SiLU."""
    monkeypatch.setattr(tiles, "TILE", tile)
    monkeypatch.setattr(tiles, "BLOCKS", {8: 1.0})
    monkeypatch.setattr(tiles, "STRIP", strip)
    ids = torch.arange(21).expand(3, -1) // 5 if packed else None
    inputs = draw(3, 21, 3, 2, 4, dtype=torch.float64)
    found = []
    for silu in (False, True):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs.differentiable]
        query, key, emitted, temperature = leaves
        gate = emitted if silu else torch.nn.functional.silu(emitted)
        average = aggregate_gates(query, key, gate, temperature, document_ids=ids, silu=silu)
        found.append([average, *torch.autograd.grad(average, leaves, inputs.grad)])
    for inside, before in zip(*found, strict=True):
        torch.testing.assert_close(inside, before, rtol=1e-12, atol=1e-12)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        emitted = inputs.gate.clone().requires_grad_()
        aggregate_gates(inputs.query, inputs.key, emitted, inputs.temperature, silu=True)
    assert emitted.data_ptr() in kept
    assert len(kept) == 4


def test_no_second_derivative() -> None:
    inputs = draw(1, 4, 1, 2, 2)
    query = inputs.query.clone().requires_grad_()
    average = IMPLS["chunked"](query, inputs.key, inputs.gate, inputs.temperature, None, None)
    (grad,) = torch.autograd.grad(average.sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match="impl='reference'"):
        grad.sum().backward()


def test_first_call_does_not_import_the_compiler() -> None:
    """It would cost two seconds and 40 MB."""
    code = (
        "import sys, torch; from tangolm.ops import aggregate_gates; x = torch.ones(1, 2, 1, 2, requires_grad=True);"
        "aggregate_gates(x, x, x, torch.ones(1)).sum().backward(); sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("tile", [1, 8 * 30, 3 * 8 * 30, 7 * 8 * 30, 100 * 8 * 30])
def test_groups_cover_every_head_once(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group is a part of one batch row, or whole rows: what hides sources differs between rows."""
    monkeypatch.setattr(tiles, "TILE", tile)
    monkeypatch.setattr(tiles, "BLOCKS", {8: 1.0})
    inputs = draw(4, 30, 3, 2, 2)
    cut = Tiles(inputs.query, inputs.key, inputs.temperature, 2, None, None)
    groups = list(cut.groups())
    assert [lane for group in groups for lane in range(group.start, group.stop)] == list(range(12))
    for low, high in ((group.start, group.stop) for group in groups):
        assert high - low <= cut.group
        assert low // 3 == (high - 1) // 3 or (low % 3 == high % 3 == 0)


def test_documents_that_ended_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "BLOCKS", {8: 1.0})
    inputs = draw(1, 32, 1, 2, 2)
    ids = torch.tensor([[0] * 5 + [1] * 12 + [2] * 15])
    cut, one = Tiles(inputs.query, inputs.key, inputs.temperature, 2, ids, None), slice(0, 1)
    assert [cut.first(one, top) for top, _ in cut.blocks()] == [0, 5, 5, 17]
    assert list(cut.source_blocks(one, 0, 32)) == [(0, 8, 0, 24), (8, 16, 8, 24), (16, 24, 16, 32), (24, 32, 24, 32)]
    assert list(cut.source_blocks(one, 16, 32)) == [
        (5, 13, 16, 32),
        (13, 16, 16, 32),
        *list(cut.source_blocks(one, 0, 32))[2:],
    ]
    first, weights = cut.weights(one, 24, 32)
    assert (first, weights.shape) == (17, (1, 8, 15))

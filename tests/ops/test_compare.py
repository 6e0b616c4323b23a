"""The judge finds what is wrong: a judge that passes everything would pass a broken kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tangolm import ops
from tangolm.ops.compare import NAMES, Implementation, compare, draw, relative_rms


class _Scaled(torch.autograd.Function):
    """The identity with a gradient that is off by a factor."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad * ctx.factor, None


def wrong_gradient(index: int, factor: float) -> Implementation:
    def implementation(*args: Tensor | None) -> Tensor:
        changed = list(args)
        changed[index] = _Scaled.apply(changed[index], factor)
        return ops.IMPLS["reference"](*changed)  # type: ignore[arg-type]

    return implementation


def wrong_average(change: Callable[[Tensor], Tensor]) -> Implementation:
    return lambda *args: change(ops.IMPLS["reference"](*args))  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "slip"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05), (torch.float64, 1e-9)])
@pytest.mark.parametrize("index", range(4))
def test_rejects_a_wrong_gradient(index: int, dtype: torch.dtype, slip: float) -> None:
    inputs = draw(2, 33, 2, 8, 16, dtype=dtype)
    comparison = compare(wrong_gradient(index, 1 + slip), inputs)
    assert [error.name for error in comparison.errors if not error.passed] == [NAMES[1 + index]]
    assert "TOO LARGE" in str(comparison)
    assert compare(wrong_gradient(index, 1.0), inputs).passed


def test_rejects_a_wrong_average() -> None:
    inputs = draw(2, 33, 2, 8, 16)
    assert not compare(wrong_average(lambda y: y * (1 + 1e-5)), inputs).passed
    assert not compare(wrong_average(lambda y: y * float("nan")), inputs).passed
    assert not compare(wrong_average(lambda y: y.roll(1, 1)), inputs).passed


def test_rejects_one_wrong_destination_of_many() -> None:
    """One destination of 256 takes the weights of other sources."""

    def implementation(query: Tensor, key: Tensor, *rest: Tensor | None) -> Tensor:
        average = ops.IMPLS["reference"](query, key, *rest)  # type: ignore[arg-type]
        other = ops.IMPLS["reference"](query, key.roll(1, 1), *rest)  # type: ignore[arg-type]
        return torch.cat([average[:, :200], other[:, 200:201], average[:, 201:]], 1)

    assert not compare(implementation, draw(1, 256, 1, 8, 16)).passed


def test_rejects_ignored_documents_and_padding() -> None:
    ids = torch.tensor([[0, 0, 0, 1, 1, 1]])
    mask = torch.tensor([[False, True, True, True, True, True]])
    for documents, real in ((ids, None), (None, mask)):
        inputs = draw(1, 6, 2, 8, 16, document_ids=documents, mask=real)
        assert compare("auto", inputs).passed
        assert not compare(lambda q, k, g, t, d, m: ops.IMPLS["reference"](q, k, g, t, None, None), inputs).passed


def test_relative_rms() -> None:
    oracle = torch.tensor([3.0, 4.0])
    assert relative_rms(oracle, oracle) == 0
    assert relative_rms(oracle * 1.5, oracle) == pytest.approx(0.5)
    assert relative_rms(torch.tensor([0.2, 0.2]), torch.zeros(2)) == pytest.approx(0.2)


def test_unknown_implementation() -> None:
    with pytest.raises(ValueError, match="impl 'nothing' is not known"):
        compare("nothing", draw(1, 2, 1, 2, 2))

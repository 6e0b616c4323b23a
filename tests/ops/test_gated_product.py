"""W (a * b) with the factors kept."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tangolm.ops import gated_product


def draw(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a, b [2, 5, 6], weight [4, 6] and a gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 5, 6), (2, 5, 6), (4, 6), (2, 5, 4))
    a, b, weight, grad = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return a.requires_grad_(), b.requires_grad_(), weight.requires_grad_(), grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_is_the_formula(dtype: torch.dtype) -> None:
    a, b, weight, grad = draw(dtype)
    results = [
        [y, *torch.autograd.grad(y, (a, b, weight), grad)]
        for y in (gated_product(a, b, weight), F.linear(a * b, weight))
    ]
    assert all(torch.equal(ours, plain) for ours, plain in zip(*results, strict=True))


def test_operators_are_what_torch_expects() -> None:
    a, b, weight, grad = draw(torch.float64)
    torch.library.opcheck(torch.ops.tangolm.gated_product, (a, b, weight))
    torch.library.opcheck(torch.ops.tangolm.gated_product_backward, (grad, a.detach(), b.detach(), weight.detach()))


def test_factors_are_kept_and_nothing_else() -> None:
    a, b, weight, _ = draw()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        gated_product(a, b, weight)
    assert kept == [a.data_ptr(), b.data_ptr(), weight.data_ptr()]


def test_autocast_narrows_the_weight_alone() -> None:
    """It is kept as it is, so that a looped model keeps one for all applications."""
    a, b, weight, _ = draw()
    narrow = a.detach().bfloat16(), b.detach().bfloat16()
    kept: list[int] = []
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x),
    ):
        y = gated_product(*narrow, weight)
    assert y.dtype == torch.bfloat16
    assert weight.data_ptr() in kept
    (grad,) = torch.autograd.grad(y.float().sum(), weight)
    assert grad.dtype == torch.float32


def test_second_derivatives_are_in_the_reference() -> None:
    a, b, weight, _ = draw(torch.float64)
    assert torch.autograd.gradgradcheck(lambda *x: gated_product(*x, impl="reference"), (a, b, weight))
    (grad,) = torch.autograd.grad(gated_product(a, b, weight).sum(), a, create_graph=True)
    with pytest.raises(NotImplementedError, match="impl='reference'"):
        grad.sum().backward()

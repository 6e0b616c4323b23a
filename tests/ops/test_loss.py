"""The head's loss by blocks against logits and torch's cross-entropy, in float64 and in the compute dtypes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tangolm.ops import loss
from tangolm.ops.loss import IGNORED, head_nll

ROWS, WIDTH, VOCABULARY, PADDED = 23, 8, 13, 16


@pytest.fixture(params=[1, 4 * VOCABULARY, 2**24], ids=["row by row", "blocks", "one block"], autouse=True)
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "BLOCK_LOGITS", request.param)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    embedding = torch.randn(PADDED, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    targets[::5] = IGNORED
    return hidden, embedding, targets


def with_logits(hidden: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, embedding[:VOCABULARY])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def results(function: object, hidden: Tensor, embedding: Tensor, targets: Tensor) -> list[Tensor]:
    value = function(hidden, embedding, targets)  # type: ignore[operator]
    return [value.detach(), *torch.autograd.grad(3 * value, (hidden, embedding))]


def ours(hidden: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    return head_nll(hidden, embedding, targets, VOCABULARY)


def test_float64() -> None:
    for got, expected in zip(results(ours, *inputs()), results(with_logits, *inputs()), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_that_of_the_logits_version(dtype: torch.dtype) -> None:
    hidden, embedding, targets = inputs(dtype)
    exact = results(
        with_logits,
        hidden.detach().double().requires_grad_(),
        embedding.detach().double().requires_grad_(),
        targets,
    )
    for got, naive, right in zip(
        results(ours, *inputs(dtype)), results(with_logits, *inputs(dtype)), exact, strict=True
    ):
        assert got.dtype == naive.dtype
        errors = [(value.double() - right).norm() / right.norm() for value in (got, naive)]
        assert errors[0] <= 1.5 * errors[1] + 2 * torch.finfo(got.dtype).eps


def test_autocast_multiplies_in_its_dtype_and_returns_the_parameters_dtype() -> None:
    hidden, embedding, targets = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = ours(hidden, embedding, targets)
    exact = results(ours, *inputs())
    assert value.dtype == torch.float32
    for got, right in zip([value.detach(), *torch.autograd.grad(3 * value, (hidden, embedding))], exact, strict=True):
        assert got.dtype == torch.float32
        error = (got.double() - right).norm() / right.norm()
        assert 1e-7 < error < 2e-2  # rounded to bfloat16 somewhere, and no worse


def test_only_what_is_asked_for() -> None:
    hidden, embedding, targets = inputs()
    assert not ours(hidden.detach(), embedding.detach(), targets).requires_grad
    (only_hidden,) = torch.autograd.grad(ours(hidden, embedding.detach(), targets), hidden)
    (only_embedding,) = torch.autograd.grad(ours(hidden.detach(), embedding, targets), embedding)
    _, both_hidden, both_embedding = results(ours, *inputs())
    torch.testing.assert_close(3 * only_hidden, both_hidden)
    torch.testing.assert_close(3 * only_embedding, both_embedding)
    assert not only_embedding[VOCABULARY:].any()


def test_nothing_supervised_is_zero() -> None:
    hidden, embedding, targets = inputs()
    value, grad_hidden, grad_embedding = results(ours, hidden, embedding, torch.full_like(targets, IGNORED))
    assert value == 0
    assert not grad_hidden.any()
    assert not grad_embedding.any()

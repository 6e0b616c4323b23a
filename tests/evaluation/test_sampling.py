"""Choosing a token."""

from __future__ import annotations

import math

import pytest
import torch

from tangolm.evaluation.sampling import Sampling

LOGITS = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()


def draws(sampling: Sampling, logits: torch.Tensor = LOGITS, count: int = 4000) -> torch.Tensor:
    """Share of each token over evenly spaced uniform numbers."""
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens = sampling.next_tokens(logits.expand(count, -1), len(logits), uniform)
    return torch.bincount(tokens, minlength=len(logits)) / count


@pytest.mark.case(12)
def test_temperature_0_is_argmax() -> None:
    logits = torch.randn(7, 97, generator=torch.Generator().manual_seed(0))
    for uniform in (torch.zeros(7), torch.full((7,), 0.999)):
        assert torch.equal(Sampling().next_tokens(logits, 97, uniform), logits.argmax(-1))


@pytest.mark.case(12)
def test_top_k_above_the_vocabulary_keeps_all() -> None:
    logits = torch.randn(97, generator=torch.Generator().manual_seed(0))
    assert torch.equal(draws(Sampling(1.0, top_k=500), logits), draws(Sampling(1.0), logits))


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1.0), [0.5, 0.2, 0.15, 0.1, 0.05]),
        (Sampling(1.0, top_k=1), [1, 0, 0, 0, 0]),
        (Sampling(1.0, top_k=2), [5 / 7, 2 / 7, 0, 0, 0]),
        (Sampling(1.0, top_p=0.5), [1, 0, 0, 0, 0]),
        (Sampling(1.0, top_p=0.6), [5 / 7, 2 / 7, 0, 0, 0]),
        (Sampling(1.0, top_p=1.0), [0.5, 0.2, 0.15, 0.1, 0.05]),
        (Sampling(1.0, top_p=1e-9), [1, 0, 0, 0, 0]),
        (Sampling(1.0, top_k=3, top_p=0.6), [5 / 7, 2 / 7, 0, 0, 0]),
        (Sampling(1e-300), [1, 0, 0, 0, 0]),
        (Sampling(1e300), [0.2] * 5),
    ],
)
def test_shares(sampling: Sampling, expected: list[float]) -> None:
    assert draws(sampling).tolist() == pytest.approx(expected, abs=1e-3)


@pytest.mark.case(34)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(2.0, top_k=500), Sampling(0.5, top_p=0.99)])
def test_padding_of_the_vocabulary_is_never_chosen(sampling: Sampling) -> None:
    logits = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    logits[:, 97:] = 50.0  # by far the most likely
    for uniform in (0.0, 0.5, math.nextafter(1.0, 0.0)):
        tokens = sampling.next_tokens(logits, 97, torch.full((64,), uniform, dtype=torch.float64))
        assert int(tokens.max()) < 97


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.6)])
def test_the_largest_uniform_number_stays_inside_the_cut(sampling: Sampling) -> None:
    token = sampling.next_tokens(LOGITS[None], 5, torch.tensor([math.nextafter(1.0, 0.0)], dtype=torch.float64))
    assert int(token) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.5),
    ],
)
def test_value_out_of_range_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be"):
        Sampling(**{field: value})  # type: ignore[arg-type]


def test_logits_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="not numbers"):
        Sampling().next_tokens(torch.tensor([[0.0, math.nan]]), 2, torch.zeros(1))

"""Feature maps: what they estimate, and with what error."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tangolm.ops.features import (
    FEATURES,
    both_ways,
    exponential_directions,
    log_scale,
    log_weights,
    projections,
    random_directions,
)

maps = pytest.mark.parametrize("name", sorted(FEATURES))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def unit_vectors(*shape: int, seed: int = 0) -> torch.Tensor:
    return F.normalize(torch.randn(shape, generator=seeded(seed), dtype=torch.float64), dim=-1)


def estimates(tau: float, width: int, count: int, draws: int = 8000, longer: float = 1.0) -> tuple[torch.Tensor, ...]:
    """Of 64 pairs, some with <q, k> = 1: the mean over drawn maps, its standard error, and the exact weight."""
    query, key = unit_vectors(8, 1, width, seed=1), unit_vectors(8, 1, width, seed=2)
    query[0], key[0] = key[1], key[1]
    directions = longer * random_directions(draws, count, width, seeded(3)).double()
    parts = []
    for part in directions.split(1000):  # each head is a draw
        heads = len(part)
        pairs = query.expand(-1, heads, -1), key.expand(-1, heads, -1)
        parts.append(log_weights(*pairs, torch.full((heads,), tau).double(), part).exp())
    weights = torch.cat(parts, -1)
    return weights.mean(-1), weights.std(-1) / math.sqrt(draws), (tau * query[:, 0] @ key[:, 0].T).exp()


@pytest.mark.parametrize("tau", [0.25, 0.5, 1.0])
@pytest.mark.parametrize(("width", "count", "seen"), [(32, 32, 0.06), (8, 20, 0.1), (8, 3, 0.3)])
def test_far_weights_are_unbiased(tau: float, width: int, count: int, seen: float) -> None:
    """The mean over 8,000 maps lies within 4.5 standard errors of exp(tau <q, k>), for each of 64 pairs.

    False alarms: with an unbiased map below 64 * 7e-6 = 0.0005. Power: a bias of `seen` is at least 7.5 standard errors
    (asserted), of which at most 4.5 are allowed: it is found with probability above 0.998.
    """
    mean, error, exact = estimates(tau, width, count)
    assert (7.5 * error < seen * exact).all(), "the test has lost its power"
    assert ((mean - exact).abs() < 4.5 * error).all()


def test_a_biased_map_is_noticed() -> None:
    """Directions 2 % too long: the test above can fail."""
    mean, error, exact = estimates(1.0, 32, 32, longer=1.02)
    assert ((mean - exact).abs() > 4.5 * error).any()


def test_relative_deviation_grows_with_temperature() -> None:
    """What docs and docstrings say: about 0.2 at tau 1, and no estimate to speak of at sqrt(32)."""
    draws = 2000
    query, key = (unit_vectors(8, 1, 32, seed=seed).expand(-1, draws, -1) for seed in (1, 2))
    directions = random_directions(draws, 32, 32, seeded(3)).double()
    spread = {}
    for tau in (1.0, math.sqrt(32)):
        weights = log_weights(query, key, torch.full((draws,), tau).double(), directions).exp()
        spread[tau] = (weights.std(-1) / weights.mean(-1)).mean().item()
    assert 0.1 < spread[1.0] < 0.4
    assert spread[math.sqrt(32)] > 2


def test_random_directions_are_orthogonal_and_as_long_as_gaussian_ones() -> None:
    directions = random_directions(500, 40, 16, seeded(0)).double()
    assert directions.shape == (500, 40, 16)
    for block in (directions[:, :16], directions[:, 16:32], directions[:, 32:]):
        gram = F.normalize(block, dim=-1) @ F.normalize(block, dim=-1).transpose(1, 2)
        torch.testing.assert_close(gram, torch.eye(len(block[0])).double().expand_as(gram), atol=1e-5, rtol=0)
    lengths = directions.norm(dim=-1)
    assert abs(lengths.square().mean() - 16) < 0.25  # chi squared: mean 16, standard error 0.04
    assert abs(lengths.square().std() - math.sqrt(32)) < 0.25
    # A direction counts both ways, so its mean is 0 and this is the covariance.
    both = torch.cat([directions, -directions]).flatten(0, 1)
    torch.testing.assert_close(both.T.cov(), torch.eye(16).double(), atol=0.06, rtol=0)


def test_directions_follow_the_seed() -> None:
    first, again, other = (random_directions(2, 8, 8, seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1]), "heads share their noise"


def test_exponential_is_elementwise() -> None:
    x = unit_vectors(1, 5, 2, 8)
    tau = torch.tensor([1.0, 4.0]).double()
    features = both_ways(projections(x, tau, exponential_directions(2, 8, 8, None))).exp()
    scale = (tau[:, None] * 8).sqrt()
    torch.testing.assert_close(features, torch.cat([(scale * x).exp(), (-scale * x).exp()], -1), rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="16 features a head, got 12"):
        exponential_directions(2, 6, 8, None)


def test_exponential_has_the_scale_of_the_exact_weight() -> None:
    """On the average over rotations; and not for every pair, as the random map has."""
    tau = torch.tensor([1.0]).double()
    directions = exponential_directions(1, 32, 32, None).double()
    rotations = torch.linalg.qr(torch.randn(2000, 32, 32, generator=seeded(0), dtype=torch.float64)).Q
    query, key = unit_vectors(1, 32, seed=1), unit_vectors(1, 32, seed=2)
    rotated = torch.stack([query @ rotations, key @ rotations])[:, :, 0]  # [2, rotations, D]
    estimate = torch.stack(
        [log_weights(q[None, None], k[None, None], tau, directions).exp() for q, k in rotated.unbind(1)]
    )
    exact = (query * key).sum().exp()
    assert abs(estimate.mean() / exact - 1) < 0.05


@maps
def test_log_weights_are_the_product_of_features(name: str) -> None:
    query, key = unit_vectors(3, 2, 32, seed=1), unit_vectors(4, 2, 32, seed=2)
    tau = torch.tensor([0.5, 3.0]).double()
    directions = FEATURES[name](2, 32, 32, seeded(0)).double()
    phi_query, phi_key = (
        (both_ways(projections(x[None], tau, directions)[0]) - tau[:, None] / 2).exp() / 8 for x in (query, key)
    )
    product = torch.einsum("thm,shm->tsh", phi_query, phi_key)
    torch.testing.assert_close(log_weights(query, key, tau, directions).exp(), product)
    assert torch.allclose(log_scale(tau, directions), -tau - math.log(64))

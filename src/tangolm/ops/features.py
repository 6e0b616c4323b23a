"""Positive feature maps that estimate exp(tau <q, k>) by a product of a function of q and one of k, for unit vectors.

    phi(x)_(f, +-) = exp(+- sqrt(tau) <w_f, x> - tau / 2) / sqrt(m),  m = 2 M      phi(q)^T phi(k) ~ exp(tau <q, k>)

A map is its directions w_f, M a head. With w ~ N(0, I) the estimate is unbiased (positive random features in hyperbolic form):
E exp(sqrt(tau) <w, q + k>) = exp(tau |q + k|^2 / 2) = exp(tau + tau <q, k>). Its relative standard deviation is 0.2 at
tau 1 and above 7 at tau 32. Only logarithms of features leave this file: at a large tau they span more than float32 does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor


def random_directions(heads: int, count: int, width: int, generator: torch.Generator | None) -> Float[Tensor, "H M D"]:
    """Orthogonal in blocks of `width`, each direction as long as a Gaussian vector: w ~ N(0, I), with less variance."""
    gaussian = torch.randn((heads, -(-count // width), width, width), generator=generator, dtype=torch.float64)
    # The signs that a QR decomposition chooses do not matter, since every direction is taken both ways.
    bases = torch.linalg.qr(gaussian).Q.flatten(1, 2)[:, :count]
    lengths = torch.randn((heads, count, width), generator=generator, dtype=torch.float64).norm(dim=-1, keepdim=True)
    return (bases * lengths).to(torch.float32)


def exponential_directions(
    heads: int, count: int, width: int, generator: torch.Generator | None
) -> Float[Tensor, "H M D"]:
    """The axes, sqrt(D) long as Gaussian vectors are on average: phi is exp(+- sqrt(tau D) x_c), elementwise.

    It estimates the same weight where vectors lie without regard to the axes; nothing is drawn.

    Raises:
        ValueError: another number of directions than axes.
    """
    if count != width:
        raise ValueError(f"the elementwise exponential map has {2 * width} features a head, got {2 * count}")
    return (math.sqrt(width) * torch.eye(width)).expand(heads, width, width).contiguous()


# Adding a map is a line here: (heads, directions a head, width of a query, generator or None for torch's own) -> directions.
FEATURES: dict[str, Callable[[int, int, int, torch.Generator | None], Tensor]] = {
    "random": random_directions,
    "exponential": exponential_directions,
}


def projections(
    x: Float[Tensor, "B T H D"], temperature: Float[Tensor, " H"], directions: Float[Tensor, "H M D"]
) -> Float[Tensor, "B T H M"]:
    """sqrt(tau) <w_f, x>, in the dtype of x."""
    return torch.einsum("bthd,hmd->bthm", x, directions.to(x.dtype)) * temperature.to(x.dtype).sqrt()[:, None]


def both_ways(projected: Float[Tensor, "... M"]) -> Float[Tensor, "... m"]:
    """The M projections and their negatives: the logarithms of the features up to `log_scale`."""
    return torch.cat([projected, -projected], dim=-1)


def log_scale(temperature: Float[Tensor, " H"], directions: Float[Tensor, "H M D"]) -> Float[Tensor, " H"]:
    """What the logarithms of phi(q) and phi(k) lack together: -tau - log m."""
    return -temperature - math.log(2 * directions.shape[1])


def log_weights(
    query: Float[Tensor, "T H D"],
    key: Float[Tensor, "S H D"],
    temperature: Float[Tensor, " H"],
    directions: Float[Tensor, "H M D"],
) -> Float[Tensor, "T S H"]:
    """log(phi(q)^T phi(k)) of all pairs, as written."""
    log_query, log_key = (both_ways(projections(x[None], temperature, directions)[0]) for x in (query, key))
    return torch.logsumexp(log_query[:, None] + log_key, dim=-1) + log_scale(temperature, directions)

"""Few numbers about few runs: mean and sample standard deviation over seeds, an interval for a share of answers.

sd = sqrt(sum (x - mean)^2 / (n - 1))
Wilson: (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)        z = 1.96
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

Z95 = 1.959963984540054


class Spread(NamedTuple):
    """Mean and sample standard deviation of n values; `sd` is None for a single one."""

    mean: float
    sd: float | None
    n: int


def spread(values: Iterable[float]) -> Spread:
    """Mean and sample standard deviation.

    Raises:
        ValueError: no values.
    """
    known = list(values)
    if not known:
        raise ValueError("values is empty; give at least one")
    return Spread(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


def wilson(hits: int, of: int) -> tuple[float, float]:
    """The 95 % interval of a share, sensible near 0 and 1 too.

    Raises:
        ValueError: `of` below 1, or `hits` outside 0 to `of`.
    """
    if of < 1 or not 0 <= hits <= of:
        raise ValueError(f"hits must be 0 to of, and of at least 1; got {hits} of {of}")
    share, square = hits / of, Z95**2 / of
    middle = share + square / 2
    half = Z95 * math.sqrt(share * (1 - share) / of + square / (4 * of))
    return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))

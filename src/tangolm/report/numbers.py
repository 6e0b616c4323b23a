"""Figures as people read them."""

from __future__ import annotations

import math

from tangolm.experiments.statistics import Spread

MISSING = "not measured"


def count(value: float) -> str:
    """A whole number with separators."""
    return f"{value:,.0f}"


def short(value: float, unit: str = "") -> str:
    """Three significant digits and a decimal prefix: 1.94 G."""
    power = min(4, max(0, int(math.log10(abs(value)) // 3))) if value else 0
    scaled = value / 1000**power
    digits = max(0, 2 - math.floor(math.log10(abs(scaled)))) if scaled else 0
    return f"{scaled:.{min(digits, 2)}f} {('', 'k', 'M', 'G', 'T')[power]}{unit}".strip()


def rate(value: float) -> str:
    """Three significant digits, written out: 6,380."""
    digits = 3 - len(str(int(value)))
    return f"{round(value, digits):,.{max(0, digits)}f}"


def nats(value: float) -> str:
    """An NLL."""
    return f"{value:.3f}"


def percent(share: float) -> str:
    """A share."""
    return f"{100 * share:.1f} %"


def gibibytes(value: float) -> str:
    """Memory."""
    return f"{value / 2**30:.2f} GiB"


def mean_sd(values: Spread, scale: float = 1.0, digits: int = 3) -> str:
    """Mean, sample standard deviation and how many: `1.650 ± 0.012 (n = 3)`."""
    sd = "" if values.sd is None else f" ± {scale * values.sd:.{digits}f}"
    return f"{scale * values.mean:.{digits}f}{sd} (n = {values.n})"

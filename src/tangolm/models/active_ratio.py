"""Geometries of the active-ratio comparison (paper Tables 9 and 10): equal size, from wide and flat to narrow and gated.

The rule that gives every row of Table 9: d = 32 H, F / H whole, the total with the GPT-2 vocabulary within 0.5 % of 70.0 M,
and F / d nearest the target ratio.
"""

from __future__ import annotations

import math

from tangolm.models.presets import GPT2_VOCABULARY
from tangolm.models.tango import TangoConfig

TOTAL, TOLERANCE, WIDEST = 70_000_000, 0.005, 64
TARGETS = (0.5, 1, 2, 4, 8, 16)


def active_ratio(target: float, sets: int = 1, *, depth: int = 4, context: int = 8192) -> TangoConfig:
    """The TANGO of about 70.0 M parameters whose F / d is nearest `target`, with `sets` sets of gated projections.

    Raises:
        ValueError: a target that no geometry of this size comes near.
    """
    if not 0 < target < 1000:
        raise ValueError(f"target must be a ratio F / d between 0 and 1000, got {target}")
    found = []
    for heads in range(1, WIDEST + 1):

        def make(channels: int, heads: int = heads) -> TangoConfig:
            return TangoConfig(
                vocab_size=GPT2_VOCABULARY,
                context=context,
                depth=depth,
                width=32 * heads,
                gated_width=channels * heads,
                sets=sets,
            )

        one, two = (make(channels).parameters()["total"] for channels in (1, 2))
        low = max(1, math.ceil(1 + (TOTAL * (1 - TOLERANCE) - one) / (two - one)))
        high = math.floor(1 + (TOTAL * (1 + TOLERANCE) - one) / (two - one))
        # F / d = channels / 32 whatever the heads, so the nearest is the target's channels, held within the size.
        if low <= high:
            found.append(make(min(max(round(32 * target), low), high)))
    best = min(found, key=lambda config: abs(config.gated_width / config.width - target))
    error = abs(best.gated_width / best.width / target - 1)
    if error > 0.25:
        raise ValueError(
            f"target {target} is out of reach: the nearest F / d of this size is {best.gated_width / best.width:.3g}"
        )
    return best

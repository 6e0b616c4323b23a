"""The rule of the active-ratio comparison gives the paper's geometries."""

from __future__ import annotations

import pytest

from tangolm.models.active_ratio import TARGETS, active_ratio

PAPER = {
    (0.5, 1): (1280, 640),
    (1, 1): (1248, 1170),
    (2, 1): (1184, 2257),
    (4, 1): (1088, 4046),
    (8, 1): (928, 7656),
    (16, 1): (768, 12_984),
    (0.5, 3): (1216, 570),
    (1, 3): (1120, 1120),
    (2, 3): (992, 2015),
    (4, 3): (864, 3267),
    (8, 3): (704, 5346),
    (16, 3): (544, 8653),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sets", [1, 3])
def test_geometry(target: float, sets: int) -> None:
    config = active_ratio(target, sets)
    assert (config.width, config.gated_width) == PAPER[target, sets]
    assert abs(config.parameters()["total"] / 70e6 - 1) <= 0.005


def test_out_of_reach() -> None:
    with pytest.raises(ValueError, match="out of reach"):
        active_ratio(0.001)
    with pytest.raises(ValueError, match="target must be a ratio"):
        active_ratio(-1.0)

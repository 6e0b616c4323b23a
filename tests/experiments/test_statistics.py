from __future__ import annotations

import math

import pytest

from tangolm.experiments.statistics import spread, wilson


def test_spread() -> None:
    assert spread([1.0, 2.0, 4.0]) == pytest.approx((7 / 3, math.sqrt(7 / 3), 3))
    assert spread([1.5]) == (1.5, None, 1)
    with pytest.raises(ValueError, match="values is empty"):
        spread([])


def test_wilson() -> None:
    # Newcombe 1998, table I: 81 of 263 and 0 of 20.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(20, 20)[1] == 1.0
    for hits, of in ((0, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="hits must be"):
            wilson(hits, of)

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangolm.data.schedule import BLOCK, Schedule

weights = st.lists(st.floats(0.05, 20), min_size=2, max_size=5).map(tuple)


def test_alternation_takes_the_parts_in_turn() -> None:
    schedule = Schedule("alternate", (1.0, 1.0, 1.0))
    assert [schedule.turn(batch, 7) for batch in range(7)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2)]


@given(shares=weights, seed=st.integers(0, 2**32 - 1), start=st.integers(0, 5 * BLOCK))
def test_the_turns_of_a_part_follow_each_other_without_a_gap(shares: tuple[float, ...], seed: int, start: int) -> None:
    for schedule in (Schedule("weights", shares), Schedule("alternate", (1.0,) * len(shares))):
        seen: dict[int, int] = {}
        for batch in range(start, start + 60):
            part, turn = schedule.turn(batch, seed)
            assert turn == seen.get(part, turn)  # whatever was asked before
            seen[part] = turn + 1
        assert schedule.turn(start, seed) == Schedule(schedule.kind, schedule.weights).turn(start, seed)


@given(shares=weights)
def test_a_block_has_the_shares_of_the_weights(shares: tuple[float, ...]) -> None:
    schedule = Schedule("weights", shares)
    assert sum(schedule.quotas) == BLOCK
    for quota, share in zip(schedule.quotas, shares, strict=True):
        assert abs(quota - BLOCK * share / sum(shares)) < 1
    drawn = [schedule.turn(batch, 101)[0] for batch in range(BLOCK, 2 * BLOCK)]
    assert tuple(drawn.count(part) for part in range(len(shares))) == schedule.quotas


def test_the_draw_is_the_one_recorded_and_follows_the_seed() -> None:
    schedule = Schedule("weights", (3.0, 1.0))
    drawn = ["".join(str(schedule.turn(batch, seed)[0]) for batch in range(24)) for seed in (101, 102)]
    assert drawn[0] == RECORDED
    assert drawn[0] != drawn[1]
    assert drawn[0] != "".join(str(schedule.turn(BLOCK + batch, 101)[0]) for batch in range(24))


@pytest.mark.parametrize(
    ("kind", "shares", "message"),
    [
        ("alternating", (1.0, 1.0), "schedule 'alternating' is not known; did you mean 'alternate'"),
        ("weights", (1.0,), "at least 2 parts, got 1"),
        ("weights", (1.0, 0.0), "weights must be above 0 and finite, got 0.0"),
        ("weights", (1.0, float("inf")), "weights must be above 0 and finite, got inf"),
        ("weights", (1.0, 1e-5), "the smallest is below 1/1000"),
        ("alternate", (1.0, 2.0), "do not go with schedule='alternate'"),
    ],
)
def test_what_is_no_schedule_is_refused(kind: str, shares: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(kind, shares)


RECORDED = "000000000000010010000000"

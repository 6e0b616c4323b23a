"""What a figure must reach, and which of the measured ones do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bar:
    """A ratio between two rows of a result, or a figure of one.

    Args:
        what: the figure in words.
        rows: the models it is of; the bar is judged where all of them were measured.
        ratio: of those rows; None where the system does not say.
        limit: to reach, from above where `at_most`.
        where: further conditions on the options, fields and their values.
    """

    what: str
    rows: tuple[str, ...]
    ratio: Callable[..., float | None]
    limit: float
    at_most: bool = False
    where: tuple[tuple[str, Any], ...] = ()


def about(bars: Iterable[Bar], options: Any, rows: Iterable[str]) -> list[Bar]:
    """The bars that a result with these options and rows is judged by.

    Raises:
        ValueError: there is none.
    """
    bars, rows = list(bars), set(rows)
    found = [
        bar
        for bar in bars
        if all(getattr(options, name) == value for name, value in bar.where) and rows.issuperset(bar.rows)
    ]
    if not found:
        known = "; ".join(f"{','.join(bar.rows)} {dict(bar.where) or ''}".strip() for bar in bars)
        raise ValueError(f"no bar is set for these models and sizes; --check knows {known}")
    return found


def judge(bars: Iterable[Bar], options: Any, rows: dict[str, Any]) -> list[tuple[str, bool]]:
    """A line for each bar that this result is about, and whether it is met.

    Raises:
        ValueError: no bar is about it.
    """
    found = []
    for bar in about(bars, options, rows):
        got = bar.ratio(*(rows[row] for row in bar.rows))
        met = got is not None and (got <= bar.limit if bar.at_most else got >= bar.limit)
        figure = "n/a" if got is None else f"{got:.3g}"
        sign = "<=" if bar.at_most else ">="
        found.append((f"{'met' if met else 'MISSED'}: {bar.what} {figure} {sign} {bar.limit}", met))
    return found

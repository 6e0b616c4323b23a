"""Our counts against every figure of the paper for the architectures that exist."""

from __future__ import annotations

import pytest

from tangolm.experiments.paper import Comparison, count_comparisons, rows, tables

FIGURES = count_comparisons()


def test_tables_are_there() -> None:
    assert {"3", "6", "9"} <= set(tables())
    assert all(table["rows"] for table in tables().values())
    with pytest.raises(ValueError, match="table 99 is not at hand"):
        rows(99)
    assert len(FIGURES) >= 68


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.where)
def test_figure(figure: Comparison) -> None:
    assert figure.equal, f"{figure.where}: the paper has {figure.paper}, we count {figure.ours}"


def test_a_wrong_figure_is_unequal() -> None:
    assert not Comparison("x", 44.307, 44.3064, 3).equal

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tangolm.experiments.quickstart import QuickstartResult
from tangolm.experiments.statistics import spread
from tangolm.report import numbers
from tangolm.report.runs import read_runs
from tangolm.report.tables import quickstart_lines, summary_rows
from tests.report.conftest import HOSTILE


def printed(result: QuickstartResult, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(quickstart_lines(result))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_terminal_shows_the_same_figures(make_run: Callable[..., Path], tmp_path: Path) -> None:
    runs = (make_run("tango"), make_run("loop", "loop-mini-d4", nll=2.1))
    text = printed(QuickstartResult(tmp_path, tmp_path / "data", runs, None, True, 123.4, 2**30))
    for part in ("2.100", "6 of 24", "✓ 2", "✗ &7", HOSTILE, "not its official test", "123 s", "1.00 GiB"):
        assert part in text, part
    text = printed(QuickstartResult(tmp_path, tmp_path / "data", runs, None, False, 0.4, 2**30))
    assert "nothing was trained" in text


def test_the_best_of_a_row_needs_all_of_it(make_run: Callable[..., Path]) -> None:
    runs = [make_run("a"), make_run("b", nll=2.1)]
    rows = {row.label: row for row in summary_rows(read_runs(runs))}
    assert rows["Test NLL, nats a token"].best == {0}
    assert rows["Test questions answered exactly"].best == frozenset()  # equal
    rows = {row.label: row for row in summary_rows(read_runs([*runs, make_run("c", judged=False, nll=1.5)]))}
    assert rows["Test NLL, nats a token"].best == frozenset()
    assert rows["Best development NLL, nats a token"].best == {2}
    assert rows["Test NLL, nats a token"].values[2] == "not measured"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (7, "7.00"), (999, "999"), (448_790_528, "449 M"), (9.444e12, "9.44 T"), (1e16, "10000 T")],
)
def test_short(value: float, text: str) -> None:
    assert numbers.short(value) == text


@pytest.mark.parametrize(("value", "text"), [(0.123, "0.12"), (12.34, "12.3"), (6378.2, "6,380"), (123456, "123,000")])
def test_rate(value: float, text: str) -> None:
    assert numbers.rate(value) == text


def test_mean_and_deviation() -> None:
    assert numbers.mean_sd(spread([1.0, 2.0, 3.0])) == "2.000 ± 1.000 (n = 3)"
    assert numbers.mean_sd(spread([0.5]), 100, 1) == "50.0 (n = 1)"

from __future__ import annotations

import io
import json
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


def test_speed_memory_and_temperatures_are_shown_where_they_were_recorded(make_run: Callable[..., Path]) -> None:
    plain, full = make_run("a"), make_run("b")
    lines = [json.loads(line) for line in (full / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "train":
            line |= {"operations_per_s": 2e9, "utilisation": None, "memory_bytes": 2**30 + line["step"]}
        else:
            line |= {"temperatures": {"block 0": [10.0, line["step"] / 10]}}
    lines.append(
        {"kind": "spike", "step": 40, "loss": 9.0, "usual": 2.0, "sample_ids": [], "last_good_checkpoint": None}
    )
    (full / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = {row.label: row.values for row in summary_rows(read_runs([plain, full]))}
    assert rows["Model operations a second"] == ("not measured", "2.00 G")
    assert rows["Peak memory"] == ("not measured", "1.00 GiB")
    temperatures = rows["Temperatures of the heads, first to last evaluation"]
    assert temperatures == ("not measured", "5.50 (1.00–10.00) to 7.00 (4.00–10.00)")
    assert "Peak memory" not in {row.label for row in summary_rows(read_runs([plain]))}

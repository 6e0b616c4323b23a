"""The progress of commands, on a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tangolm.cli.app import Bars, progress


def test_a_bar_ends_with_its_work() -> None:
    """Training draws its own display between two bars: none may still be live then."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    bars = Bars(console)
    bars(1, 2, "generating")
    assert console._live_stack
    bars(2, 2, "generating")
    assert not console._live_stack
    bars(1, 0, "reading")  # of unknown length
    bars.stop()
    assert not console._live_stack
    assert "generating" in out.getvalue()
    assert "reading" in out.getvalue()


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with progress() as report:
        for done in range(1, 1001):
            report(done, 1000, "generating")
        report(7, 0, "reading")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["generating: 1 of 1,000", "generating: 1,000 of 1,000", "reading: 7"]

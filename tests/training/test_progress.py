"""What a run shows: plain lines where there is no terminal, one live line where there is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tangolm.training.progress import Display

EVALUATION = {"step": 2, "split": "dev", "nll": 1.5, "best": True}


def record(step: int) -> dict[str, float]:
    return {"step": step, "loss": 2.0, "tokens_per_s": 1234.5}


def shown(terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=120, soft_wrap=not terminal)
    with Display(3, 0, console=console) as display:
        display.note("device [cpu]")
        for step in (1, 2, 3):
            display.step(record(step))
        display.evaluation(EVALUATION)
    return file.getvalue()


def test_plain_lines_without_a_terminal() -> None:
    lines = shown(terminal=False).splitlines()
    assert lines[0] == "device [cpu]"
    assert lines[1].startswith("step 1/3  loss 2.0000  1,234 tokens/s  ETA ")
    assert lines[2].startswith("step 3/3")
    assert lines[3] == "step 2/3  dev NLL 1.5000 nats  (best so far)"
    assert "\x1b" not in "".join(lines)


def test_live_line_on_a_terminal() -> None:
    text = shown(terminal=True)
    assert "\x1b" in text
    assert "3/3" in text
    assert "1,234 tokens/s" in text


def test_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(3, 0, shown=False) as display:
        display.note("device")
        display.step(record(1))
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""

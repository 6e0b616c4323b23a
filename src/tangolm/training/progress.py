"""What a run shows while it trains: a live line on a terminal, plain lines elsewhere; always on stderr."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

LINE_SECONDS = 5.0  # between plain lines


class Display:
    """Shows steps, evaluations and notes; `shown=False` is silent."""

    def __init__(self, steps: int, step: int, shown: bool = True, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, quiet=not shown, soft_wrap=True, highlight=False)
        self._steps = steps
        self._start, self._started = step, time.monotonic()
        self._next_line = 0.0
        self._bar: Progress | None = None
        if shown and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=steps, completed=step, text="")

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._bar.start()
        self._started = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, record: Mapping[str, Any]) -> None:
        """Show a train record."""
        step = record["step"]
        elapsed = time.monotonic() - self._started
        left = elapsed / (step - self._start) * (self._steps - step)
        text = f"loss {record['loss']:.4f}  {record['tokens_per_s']:,.0f} tokens/s  ETA {_clock(left)}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=text)
        elif elapsed >= self._next_line or step == self._steps:
            self._next_line = elapsed + LINE_SECONDS
            self.note(f"step {step}/{self._steps}  {text}")

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Show an evaluation record."""
        mark = "  (best so far)" if record["best"] else ""
        self.note(f"step {record['step']}/{self._steps}  {record['split']} NLL {record['nll']:.4f} nats{mark}")

    def note(self, text: str) -> None:
        """Print a line above the live one."""
        self._console.print(text, markup=False)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

"""What a run shows while it trains: a live line on a terminal, plain lines elsewhere; always on stderr."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from statistics import fmean, median
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from tangolm.training.metrics import WARMUP_UPDATES

RATES = 20  # updates over which the shown rate is a median
LINE_SECONDS = 5.0  # between plain lines


class Display:
    """Shows steps, evaluations and notes; `shown=False` is silent."""

    def __init__(self, steps: int, step: int, shown: bool = True, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, quiet=not shown, soft_wrap=True, highlight=False)
        self._steps = steps
        self._start, self._started = step, time.monotonic()
        self._next_line = 0.0
        self._rates: deque[float] = deque(maxlen=RATES)
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
        if step - self._start == WARMUP_UPDATES + 1:
            self._rates.clear()  # the ones before say nothing about the rate
        self._rates.append(record["tokens_per_s"])
        text = f"loss {record['loss']:.4f}  {median(self._rates):,.0f} tokens/s  ETA {duration(left)}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=text)
        elif elapsed >= self._next_line or step == self._steps:
            self._next_line = elapsed + LINE_SECONDS
            self.note(f"step {step}/{self._steps}  {text}")

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Show an evaluation record."""
        mark = "  (best so far)" if record["best"] else ""
        taus = [tau for block in record.get("temperatures", {}).values() for tau in block]
        heads = f"  tau {min(taus):.2f} to {max(taus):.2f}, mean {fmean(taus):.2f}" if taus else ""
        self.note(f"step {record['step']}/{self._steps}  {record['split']} NLL {record['nll']:.4f} nats{mark}{heads}")

    def spike(self, record: Mapping[str, Any]) -> None:
        """Show a spike of the loss; the run goes on."""
        good = record["last_good_checkpoint"]
        before = f"{good} is the last checkpoint before it" if good else "there is no checkpoint before it"
        self.note(
            f"step {record['step']}/{self._steps}  a spike: loss {record['loss']:.4f}, usually {record['usual']:.4f}; {before}; "
            "metrics.jsonl names its rows"
        )

    def note(self, text: str) -> None:
        """Print a line above the live one."""
        self._console.print(text, markup=False)


def duration(seconds: float) -> str:
    """Minutes and seconds, hours before them where there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

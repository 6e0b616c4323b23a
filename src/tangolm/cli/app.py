"""What the commands share: unknown names are answered with near ones; results as JSON or a table; progress."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
import typer.core
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tangolm.config import suggest
from tangolm.data import Progress as Report

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
LINE_SECONDS = 5.0  # between plain lines of progress


class Commands(typer.core.TyperGroup):
    """A group that names the nearest command where it does not know one."""

    what = "command"

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            raise ValueError(f"{self.what} {args[0]!r} is not known{suggest(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


def items(text: str) -> list[str]:
    """The items of a comma-separated option."""
    return [item.strip() for item in text.split(",") if item.strip()]


def whole_numbers(text: str, option: str) -> list[int]:
    """The items of a comma-separated option as whole numbers.

    Raises:
        ValueError: naming the option, where one is not.
    """
    try:
        return [int(item) for item in items(text)]
    except ValueError:
        raise ValueError(f"{option} must be whole numbers, comma-separated, got {text!r}") from None


def print_json(data: Any) -> None:
    """JSON alone on stdout."""
    print(json.dumps(data, indent=2, allow_nan=False))


def console() -> Console:
    """Where tables go: stdout, as wide as it is."""
    return Console(highlight=False)


@contextmanager
def progress() -> Iterator[Report]:
    """A function to report (done, total, text) to: a bar on a terminal, a plain line now and then elsewhere; on stderr."""
    shown = Console(stderr=True)
    if not shown.is_terminal:
        yield _plain_lines()
        return
    bars = Bars(shown)
    try:
        yield bars
    finally:
        bars.stop()


class Bars:
    """One bar after another: each begins at its first report and goes at its last, so that others may draw between."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __call__(self, done: int, total: int, text: str) -> None:
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=None)
            self._bar.start()
        self._bar.update(self._task, description=text, completed=done, total=total or None)
        if total and done >= total:
            self.stop()

    def stop(self) -> None:
        """Take away the bar that is shown, if one is."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _plain_lines() -> Callable[[int, int, str], None]:
    last: dict[str, float] = {}

    def report(done: int, total: int, text: str) -> None:
        now = time.monotonic()
        if now - last.get(text, -LINE_SECONDS) >= LINE_SECONDS or (total and done == total):
            last[text] = now
            print(f"{text}: {done:,}" + (f" of {total:,}" if total else ""), file=sys.stderr)

    return report

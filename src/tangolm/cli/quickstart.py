"""`tangolm quickstart`: the experiment of two runs, its table in the terminal and its report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tangolm.cli.app import console, progress
from tangolm.experiments import quickstart as experiment
from tangolm.report import write_report
from tangolm.report.tables import quickstart_lines


def register(app: typer.Typer) -> None:
    app.command()(quickstart)


def quickstart(
    out: Annotated[Path, typer.Option(help="Folder for data, runs and report.")] = Path("runs/quickstart"),
    small: Annotated[bool, typer.Option("--small", help="The same in about a minute.")] = False,
) -> None:
    """Train TANGO and a Loop Transformer++ of equal size on the same mathematics questions, and compare them."""
    with progress() as report:
        result = experiment.run(out, small, report)
    if result.interrupted is not None:
        print(result.message)
        raise typer.Exit(result.exit_code)
    page = write_report(result.runs, out / "report.html", "tangolm quickstart")
    console().print(quickstart_lines(result))
    print(f"report: {page}")

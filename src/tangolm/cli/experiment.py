"""`tangolm experiment`: the grids of runs, run in full or in part, and what they gave so far."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tangolm.cli.app import Commands, Json, items, print_json, progress, whole_numbers
from tangolm.config import suggest
from tangolm.experiments import EXPERIMENTS, grid
from tangolm.experiments.grid import Grid

Name = Annotated[str, typer.Argument(help="One that `tangolm experiment list` names.")]
Out = Annotated[Path | None, typer.Option(help="Folder of its data, runs and results (runs/NAME).")]
Only = Annotated[str, typer.Option(help="Only these, comma-separated; all where empty.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(cls=Commands, help="Run comparisons of many runs and show what they gave.")
    group.command("list")(list_)
    group.command()(run)
    group.command()(show)
    app.add_typer(group, name="experiment")


def list_() -> None:
    """Every experiment, one a line."""
    for name, experiment in EXPERIMENTS.items():
        print(f"{name}: {experiment.summary}; {len(list(experiment.cells()))} runs")


def run(
    name: Name,
    out: Out = None,
    tasks: Only = "",
    systems: Only = "",
    seeds: Annotated[str, typer.Option(help="Only these model seeds, comma-separated.")] = "",
    json: Json = False,
) -> None:
    """Do what is left of an experiment's runs; interrupt it and call it again to go on."""
    experiment, folder = _experiment(name), _folder(name, out)
    cells = list(experiment.cells(items(tasks), items(systems), whole_numbers(seeds, "--seeds")))
    with progress() as report:
        records = grid.run(experiment, folder, cells, report)
    _print(experiment, records, json)


def show(name: Name, out: Out = None, json: Json = False) -> None:
    """The results so far, as a table in Markdown."""
    experiment = _experiment(name)
    _print(experiment, grid.results(experiment, _folder(name, out)), json)


def _print(experiment: Grid, records: list[dict[str, object]], json: bool) -> None:
    if json:
        print_json(records)
        return
    print("\n".join(grid.lines(experiment, records)))
    print(f"{len(records)} of {len(list(experiment.cells()))} runs; test NLL, nats a supervised token")


def _experiment(name: str) -> Grid:
    if name not in EXPERIMENTS:
        raise ValueError(f"experiment {name!r} is not known{suggest(name, EXPERIMENTS)}")
    return EXPERIMENTS[name]


def _folder(name: str, out: Path | None) -> Path:
    return Path("runs") / name if out is None else out

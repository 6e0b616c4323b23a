"""A grid of runs: each system on each task with each pair of seeds, every run kept and none done twice.

OUT/data/<task>                              prepared once
    runs/<task>/<system>/<model seed>-<data seed>
    results.json                             one record a finished run, written anew behind each

Systems of a task see the same rows in the same order. Each is judged on the test split by the checkpoint with the lowest
development NLL. A grid that was interrupted goes on where it was; part of it (some tasks or seeds) can be run at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tangolm.config import suggest
from tangolm.data import Progress, no_progress, prepare, read_manifest
from tangolm.experiments.statistics import spread
from tangolm.training import Run, RunConfig, evaluate_run, run_config, train
from tangolm.training.durable import write_json

SEEDS = ((17, 101), (23, 103), (41, 107))  # model and data seed, the paper's pairs
FORMAT = 1


@dataclass(frozen=True)
class Task:
    """What a system is trained and judged on.

    Args:
        dataset, source, options: as `tangolm.data.prepare` takes them; lists, no tuples, as the manifest has them.
        tokens, batch_size: of each run.
    """

    dataset: str
    tokens: int
    batch_size: int
    source: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class System:
    """A preset and what it overrides, as `tangolm train --set` takes it."""

    preset: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Grid:
    """An experiment: tasks and systems by name; the first system is the one that others are compared with."""

    summary: str
    tasks: dict[str, Task]
    systems: dict[str, System]
    overrides: tuple[str, ...] = ()

    def cells(
        self, tasks: Sequence[str] = (), systems: Sequence[str] = (), seeds: Sequence[int] = ()
    ) -> Iterator[Cell]:
        """The runs, all of one seed before the next; only the named tasks, systems and model seeds where any are named.

        Raises:
            ValueError: a task, system or model seed that the grid does not have.
        """
        models = [str(model) for model, _ in SEEDS]
        for name, asked, known in (
            ("tasks", tasks, list(self.tasks)),
            ("systems", systems, list(self.systems)),
            ("seeds", [str(seed) for seed in seeds], models),
        ):
            for one in asked:
                if one not in known:
                    raise ValueError(f"{name} has {one!r}{suggest(one, known)}")
        for pair in SEEDS:
            for task in self.tasks:
                for system in self.systems:
                    if (
                        (not seeds or pair[0] in seeds)
                        and (not tasks or task in tasks)
                        and (not systems or system in systems)
                    ):
                        yield Cell(task, system, *pair)


@dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    task: str
    system: str
    model_seed: int
    data_seed: int

    def place(self, out: Path) -> Path:
        return out / "runs" / self.task / self.system / f"{self.model_seed}-{self.data_seed}"


def run(
    grid: Grid, out: str | os.PathLike[str], cells: Sequence[Cell], progress: Progress = no_progress
) -> list[dict[str, Any]]:
    """Do what is left of these runs; the records of all that are finished.

    Raises:
        ValueError: data or runs in `out` that are of something else, or damaged.
        KeyboardInterrupt: a signal ended a training; it is saved, and the next call goes on with it.
    """
    folder = Path(out)
    for number, cell in enumerate(cells):
        progress(number, len(cells), f"{cell.task}, {cell.system}, seed {cell.model_seed}")
        place, config = cell.place(folder), _config(grid, cell, _data(grid, cell.task, folder))
        result = train(config, place, resume=True, progress=False)
        if result.ended != "finished":
            raise KeyboardInterrupt(result.message)
        evaluate_run(place, "test")
        write_json(folder / "results.json", {"format": FORMAT, "runs": results(grid, folder)})
    progress(len(cells), len(cells), "runs")
    return results(grid, folder)


def results(grid: Grid, out: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """A record for each run in `out` whose test result is there."""
    records = []
    for cell in grid.cells():
        place = cell.place(Path(out))
        if not Run.exists(place):
            continue
        run = Run(place)
        test = run.evaluation("test")
        if test is None:
            continue
        training = [record for record in run.metrics() if record["kind"] == "train"]
        evaluations = [record for record in run.metrics() if record["kind"] == "evaluation"]
        records.append(
            {
                "task": cell.task,
                "system": cell.system,
                "model_seed": cell.model_seed,
                "data_seed": cell.data_seed,
                "tokens": sum(record["tokens"] for record in training),
                "step": test["step"],
                "dev_nll": min(record["nll"] for record in evaluations),
                "last_dev_nll": evaluations[-1]["nll"],
                "test_nll": test["nll"],
                "test_tokens": test["tokens"],
                "seconds": sum(record["seconds"] for record in training),
            }
        )
    return records


def lines(grid: Grid, records: Sequence[dict[str, Any]]) -> list[str]:
    """A Markdown table: test NLL a system and task as mean and sample standard deviation, with the number of seeds."""
    tasks = [task for task in grid.tasks if any(record["task"] == task for record in records)]
    rows = [
        f"| system | {' | '.join(tasks)} |",
        f"|---|{'---|' * len(tasks)}",
    ]
    for system in grid.systems:
        cells = []
        for task in tasks:
            found = [r["test_nll"] for r in records if (r["task"], r["system"]) == (task, system)]
            cells.append(_cell(found))
        rows.append(f"| {system} | {' | '.join(cells)} |")
    return rows


def _cell(values: list[float]) -> str:
    if not values:
        return ""
    mean, sd, count = spread(values)
    return f"{mean:.3f}" + (f" ± {sd:.3f} ({count})" if sd is not None else " (1)")


def _data(grid: Grid, name: str, out: Path) -> Path:
    """The prepared folder of a task, prepared unless it is already."""
    task, data = grid.tasks[name], out / "data" / name
    if not (data / "manifest.json").exists():
        prepare(task.dataset, task.source, data, **task.options)
    manifest = read_manifest(data)
    arguments = manifest.get("arguments", {})
    differing = [key for key, value in task.options.items() if arguments.get(key) != value]
    if manifest["dataset"] != task.dataset or differing:
        raise ValueError(f"out {str(out)!r} holds other data for {name!r} ({', '.join(differing)}); name another --out")
    return data


def _config(grid: Grid, cell: Cell, data: Path) -> RunConfig:
    task, system = grid.tasks[cell.task], grid.systems[cell.system]
    return run_config(
        system.preset,
        data,
        (*grid.overrides, *system.overrides),
        tokens=task.tokens,
        batch_size=task.batch_size,
        model_seed=cell.model_seed,
        data_seed=cell.data_seed,
    )

"""A grid of two tasks, two systems and one seed: done once, gone on with, and shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tangolm.cli import main
from tangolm.experiments import EXPERIMENTS, grid
from tangolm.experiments.grid import Cell, Grid, System, Task
from tangolm.models import preset
from tangolm.training import run_config
from tests.data.tiny import prepare_sums

ROWS = {"context": 64, "copies": 2, "spacing": 8, "train_rows": 8, "dev_rows": 2, "test_rows": 2}
SMALL = ("model.depth=1", "model.gated_width=64", "device=cpu")
TINY = Grid(
    "a small one",
    tasks={
        "near": Task("recall", tokens=256, batch_size=2, options=ROWS),
        "far": Task("recall", tokens=256, batch_size=2, options={**ROWS, "keys": 2}),
    },
    systems={
        "tango": System("tango-mini-d4", SMALL),
        "hot": System("tango-mini-d4", (*SMALL, "model.initial_temperature=20")),
    },
    overrides=("optimizer.peak_lr=0.001",),
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("grid") / "out"
    first = grid.run(TINY, out, list(TINY.cells(["near"], seeds=[17])))
    assert len(first) == 2
    return out, grid.run(TINY, out, list(TINY.cells(seeds=[17])))


def test_every_run_has_its_record(finished: tuple[Path, list[dict[str, Any]]]) -> None:
    out, records = finished
    assert [(r["task"], r["system"]) for r in records] == [(t, s) for t in TINY.tasks for s in TINY.systems]
    assert all((r["model_seed"], r["data_seed"], r["tokens"]) == (17, 101, 256) for r in records)
    assert len({r["test_nll"] for r in records}) == 4  # systems and tasks differ
    assert json.loads((out / "results.json").read_text())["runs"] == records


def test_nothing_is_done_twice(finished: tuple[Path, list[dict[str, Any]]]) -> None:
    out, records = finished
    before = {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("step-*/*")}
    assert before
    assert grid.run(TINY, out, list(TINY.cells(seeds=[17]))) == records
    assert before == {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("step-*/*")}


def test_lines_name_every_system_and_task(finished: tuple[Path, list[dict[str, Any]]]) -> None:
    _, records = finished
    lines = grid.lines(TINY, records)
    assert lines[0] == "| system | near | far |"
    assert len(lines) == 2 + len(TINY.systems)
    assert f"{records[0]['test_nll']:.3f} (1)" in lines[2]
    twice = [*records, {**records[0], "test_nll": records[0]["test_nll"] + 1}]
    assert f"{records[0]['test_nll'] + 0.5:.3f} ± 0.707 (2)" in grid.lines(TINY, twice)[2]


def test_other_data_in_its_folder_is_refused(finished: tuple[Path, list[dict[str, Any]]]) -> None:
    out, _ = finished
    other = Grid("", {"near": Task("recall", 256, 2, options={**ROWS, "seed": 1})}, TINY.systems)
    with pytest.raises(ValueError, match=r"holds other data for 'near' \(seed\)"):
        grid.run(other, out, [Cell("near", "tango", 17, 101)])


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="tasks has 'ner'; did you mean 'near'"):
        list(TINY.cells(["ner"]))
    with pytest.raises(ValueError, match="seeds has '18'"):
        list(TINY.cells(seeds=[18]))
    assert main(["experiment", "show", "windowed"]) == 2
    assert "did you mean 'windowed-defaults'" in capsys.readouterr().err


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_are_possible(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every system is a valid configuration, and all of a task take equally many tokens."""
    experiment = EXPERIMENTS[name]
    assert list(experiment.cells())
    for system in experiment.systems.values():
        assert preset(system.preset)
    for task in experiment.tasks.values():
        assert task.tokens % (task.batch_size * task.options.get("context", 256)) == 0
    prepare_sums(tmp_path / "sums", context=256)
    for system in experiment.systems.values():
        run_config(system.preset, tmp_path / "sums", (*experiment.overrides, *system.overrides), tokens=2048)
    assert main(["experiment", "list"]) == 0
    assert name in capsys.readouterr().out
    assert main(["experiment", "show", name, "--out", str(tmp_path / "none")]) == 0
    assert "0 of" in capsys.readouterr().out

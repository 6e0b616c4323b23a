"""Which checkpoints stay: the last k whole ones and the best; nothing of another run is touched."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tangolm.training import Run, RunConfig, checkpoint, train
from tangolm.training import trainer as trainer_module

Make = Callable[..., RunConfig]
BEST = 3  # the step whose development NLL is the lowest


@pytest.fixture(autouse=True)
def _best_at_step_3(monkeypatch: pytest.MonkeyPatch) -> None:
    original = trainer_module.Trainer.evaluate

    def evaluate(self: Any, state: Any) -> Any:
        before = state.best_step
        state, record = original(self, state)
        best = BEST if state.step >= BEST else state.step
        return dataclasses.replace(state, best_step=best), {**record, "best": best != before}

    monkeypatch.setattr(trainer_module.Trainer, "evaluate", evaluate)


def steps(run: Run) -> list[int]:
    return [checkpoint.step_of(path) for path in checkpoint.checkpoints(run.checkpoints)]


def damage(folder: Path, name: str = "model.safetensors") -> None:
    path = folder / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))


def at(run: Run, step: int) -> Path:
    return run.checkpoints / checkpoint.folder_name(step)


def begun(tiny: Make, out: Path, keep_last: int, stop_after: int = 8) -> Run:
    config = tiny(evaluate_every=1, keep_last=keep_last, steps=20)
    return Run(train(config, out, stop_after=stop_after, progress=False).folder)


def go_on(run: Run, more: int = 1, **fields: Any) -> Run:
    config = dataclasses.replace(run.config, **fields)
    return Run(train(config, run.folder, resume=True, stop_after=more, progress=False).folder)


@pytest.mark.parametrize(
    ("keep_last", "left"),
    [(1, [3, 8]), (2, [3, 7, 8]), (4, [3, 5, 6, 7, 8]), (7, [2, 3, 4, 5, 6, 7, 8]), (50, [*range(1, 9)])],
)
def test_the_last_k_and_the_best(tiny: Make, tmp_path: Path, keep_last: int, left: list[int]) -> None:
    assert steps(begun(tiny, tmp_path / "run", keep_last)) == left


def test_a_resumed_run_keeps_as_many_as_it_is_told(tiny: Make, tmp_path: Path) -> None:
    run = begun(tiny, tmp_path / "run", 3)
    assert steps(go_on(run)) == [3, 7, 8, 9]
    assert steps(go_on(run, 3, keep_last=5)) == [3, 8, 9, 10, 11, 12]
    assert steps(go_on(run, 1, keep_last=1)) == [3, 13]


def test_a_damaged_one_is_none_of_the_k(tiny: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = begun(tiny, tmp_path / "run", 3)
    assert steps(run) == [3, 6, 7, 8]
    damage(at(run, 7))
    result = train(run.config, run.folder, resume=True, stop_after=1)
    assert "not kept: checkpoint" in capsys.readouterr().err
    assert result.step == 9
    assert steps(run) == [3, 6, 8, 9]  # three whole ones, where the last three names would have been two
    for folder in checkpoint.checkpoints(run.checkpoints):
        checkpoint.verify(folder)


def test_the_newest_whole_one_stays_until_there_is_a_newer(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(tiny, tmp_path / "run", 2)
    assert steps(run) == [3, 7, 8]
    damage(at(run, 8))  # sealed, but not whole: training goes on from 7 and writes 8 again
    seen = []
    save = checkpoint.save

    def watched(*arguments: Any) -> Path:
        seen.append(steps(run))
        return save(*arguments)

    monkeypatch.setattr(checkpoint, "save", watched)
    go_on(run, 2)
    assert seen == [[3, 7, 8], [3, 7, 8]]
    assert steps(run) == [3, 8, 9]
    checkpoint.verify(at(run, 8))


def test_a_damaged_one_of_a_later_step_goes(tiny: Make, tmp_path: Path) -> None:
    run = begun(tiny, tmp_path / "run", 2)
    damage(at(run, 8))
    shutil.rmtree(at(run, 7))
    assert steps(go_on(run)) == [3, 4]


def test_a_checkpoint_that_somebody_took_away_is_none_of_the_k(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(tiny, tmp_path / "run", 2)
    save = checkpoint.save

    def taken(*arguments: Any) -> Path:
        shutil.rmtree(at(run, 8), ignore_errors=True)
        return save(*arguments)

    monkeypatch.setattr(checkpoint, "save", taken)
    assert steps(go_on(run)) == [3, 7, 9]


def test_nothing_foreign_is_touched(tiny: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = Run(train(tiny(model_seed=23), tmp_path / "other", stop_after=2, progress=False).folder)
    run = begun(tiny, tmp_path / "run", 3)
    shutil.copytree(other.last(), at(run, 2))  # of another run
    shutil.copytree(at(run, 8), run.checkpoints / "step-00000008-copy")  # no checkpoint's name
    shutil.copytree(at(run, 6), at(run, 1))
    damage(at(run, 1), "trainer.json")  # whose it is cannot be read
    (run.checkpoints / "step-00000005").write_text("a file")
    (run.checkpoints / "notes").mkdir()
    foreign = {path.name for path in run.checkpoints.iterdir()} - {at(run, step).name for step in (3, 6, 7, 8)}
    assert len(foreign) == 5
    go_on(run, 3, keep_last=2)
    left = {path.name for path in run.checkpoints.iterdir()}
    assert left == foreign | {at(run, step).name for step in (3, 10, 11)}
    checkpoint.verify(at(run, 2))
    capsys.readouterr()
    train(run.config, run.folder, resume=True, stop_after=1)
    train(dataclasses.replace(run.config, keep_last=9), run.folder, resume=True, stop_after=1)
    assert f"left alone: checkpoint {at(run, 2)} is of another run" in capsys.readouterr().err

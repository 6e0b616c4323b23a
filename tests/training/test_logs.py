"""TensorBoard's files hold each step once, whatever interruptions there were; wandb is met by its interface, offline."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tangolm.config import ConfigError
from tangolm.training import Run, RunConfig, logs, train
from tangolm.training.logs import scalars

Make = Callable[..., RunConfig]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard's own reader
def test_tensorboard_files_read_back(tiny: Make, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = tiny(log=("tensorboard",), steps=6, evaluate_every=3, checkpoint_every=3)
    run = Run(train(config, tmp_path / "run", stop_after=5, progress=False).folder)
    # Killed behind step 5 with nothing saved since step 3: steps 4 and 5 are done again.
    for folder in run.checkpoints.glob("step-00000005"):
        folder.rename(tmp_path / "lost")
    train(config, run.folder, resume=True, progress=False)
    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    records = run.metrics()
    steps = [record for record in records if record["kind"] == "train"]
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx([r["loss"] for r in steps])
    assert [event.step for event in events.Scalars("dev/nll")] == [3, 6]
    assert "dev/sources/add" in events.Tags()["scalars"]
    assert "dev/temperatures/block 0/1" in events.Tags()["scalars"]


class Wandb(ModuleType):
    """`wandb.init` and the run it gives, with the arguments that the package documents."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int | None, dict[str, Any]]] = []
        self.finished = 0

    def init(
        self,
        project: str | None = None,
        dir: str | None = None,
        id: str | None = None,
        name: str | None = None,
        config: dict[str, Any] | str | None = None,
        resume: bool | str | None = None,
    ) -> Wandb:
        self.begun.append({"project": project, "id": id, "name": name, "resume": resume, "config": config})
        return self

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.logged.append((step, data))

    def finish(self, exit_code: int | None = None) -> None:
        self.finished += 1


def test_wandb_goes_on_with_the_same_run(tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = tiny(log=("wandb",), steps=4, evaluate_every=2)
    train(config, tmp_path / "run", stop_after=2, progress=False)
    train(config, tmp_path / "run", resume=True, progress=False)
    assert [(one["name"], one["resume"]) for one in wandb.begun] == [("run", "allow")] * 2
    first, second = (one["id"] for one in wandb.begun)
    assert first == second
    assert first.startswith(config.run_id)
    assert wandb.begun[0]["config"]["batch_size"] == 4
    assert [step for step, _ in wandb.logged] == [1, 2, 2, 3, 4, 4]
    assert wandb.logged[0][1]["train/loss"] == Run(tmp_path / "run").metrics()[0]["loss"]
    assert wandb.finished == 2
    train(config, tmp_path / "elsewhere" / "run", stop_after=1, progress=False)
    assert wandb.begun[2]["id"] != first


@pytest.mark.parametrize(
    ("name", "module", "remedy"),
    [
        ("wandb", "wandb", "pip install wandb"),
        ("tensorboard", "torch.utils.tensorboard", r"pip install 'tangolm\[logging\]'"),
    ],
)
def test_a_missing_package_is_named_before_anything_is_written(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"log '{name}' needs a package that is not installed .*{remedy}"):
        train(tiny(log=(name,)), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_logs_may_differ_when_a_run_goes_on(tiny: Make, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(tiny(steps=2), tmp_path / "run", stop_after=1, progress=False)
    assert not (tmp_path / "run" / "tensorboard").exists()
    assert train(tiny(steps=2, log=("tensorboard",)), tmp_path / "run", resume=True, progress=False).ended == "finished"
    assert (tmp_path / "run" / "tensorboard").is_dir()


def test_only_numbers_are_scalars() -> None:
    record = {"kind": "train", "step": 3, "loss": 2.0, "utilisation": None, "tokens": 8}
    assert scalars(record) == {"train/loss": 2.0, "train/tokens": 8}
    record = {"kind": "evaluation", "step": 3, "split": "dev", "best": True, "temperatures": {"block 0": [1.0, 2.0]}}
    assert scalars(record) == {"dev/temperatures/block 0/0": 1.0, "dev/temperatures/block 0/1": 2.0}
    assert scalars({"kind": "spike", "step": 3, "loss": 9.0, "usual": 2.0, "sample_ids": [1]}) == {
        "spike/loss": 9.0,
        "spike/usual": 2.0,
    }
    assert set(logs.LOGS) == set(logs.INSTALL)

"""The loop: resumed runs equal undisturbed ones to the bit, and everything that should stop a run stops it by name."""

from __future__ import annotations

import dataclasses
import errno
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tangolm.config import ConfigError
from tangolm.data.loader import Batch, Loader
from tangolm.models import LanguageModel
from tangolm.training import Run, RunConfig, TrainingError, checkpoint, train
from tangolm.training import trainer as trainer_module
from tangolm.training.durable import locked
from tangolm.training.metrics import MetricsWriter
from tests.training.sums import MEASURED, prepare_sums, same_bits, weights

Make = Callable[..., RunConfig]


def losses(run: Run) -> list[float]:
    return [record["loss"] for record in run.metrics() if record["kind"] == "train"]


def timeless(run: Run) -> list[dict[str, Any]]:
    """The metrics without what the clock says."""
    return [{key: value for key, value in record.items() if key not in MEASURED} for record in run.metrics()]


@pytest.fixture
def sample_ids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows that training reads, in order."""
    seen: list[int] = []
    original = Loader.batch

    def batch(self: Loader, start: int, count: int | None = None) -> Batch:
        read = original(self, start, count)
        seen.extend(read.sample_ids.tolist())
        return read

    monkeypatch.setattr(Loader, "batch", batch)
    return seen


@pytest.mark.case(24)
@pytest.mark.parametrize("preset", ["tango-mini-d4", "loop-mini-d4", "untied-mini-d4"])
def test_three_calls_equal_one(tiny: Make, tmp_path: Path, sample_ids: list[int], preset: str) -> None:
    config = tiny(preset=preset, impl="auto", steps=30, evaluate_every=7, micro_batch=3, checkpoint_every=15)
    straight = Run(train(config, tmp_path / "straight", progress=False).folder)
    order = list(sample_ids)
    sample_ids.clear()
    steps = []
    for resume in (False, True, True):
        result = train(config, tmp_path / "parts", resume=resume, stop_after=10, progress=False)
        steps.append((result.step, result.ended))
    parts = Run(tmp_path / "parts")
    assert steps == [(10, "stopped"), (20, "stopped"), (30, "finished")]
    assert len(order) == 120
    assert sample_ids == order
    assert losses(parts) == losses(straight)
    assert timeless(parts) == timeless(straight)
    assert same_bits(weights(parts.last()), weights(straight.last()))
    assert same_bits(weights(parts.best()), weights(straight.best()))


@pytest.mark.case(22)
def test_evaluation_leaves_no_trace(tiny: Make, tmp_path: Path) -> None:
    with_it = Run(train(tiny(steps=6, evaluate_every=5), tmp_path / "with", progress=False).folder)
    without = Run(train(tiny(steps=6, evaluate_every=6), tmp_path / "without", progress=False).folder)
    assert [r["step"] for r in with_it.metrics() if r["kind"] == "evaluation"] == [5, 6]
    assert [r["step"] for r in without.metrics() if r["kind"] == "evaluation"] == [6]
    assert losses(with_it) == losses(without)
    assert same_bits(weights(with_it.last()), weights(without.last()))


@pytest.mark.case(23)
def test_the_schedule_counts_optimizer_steps(tiny: Make, tmp_path: Path) -> None:
    config = tiny("optimizer.warmup=3", "optimizer.peak_lr=6e-4", micro_batch=1, steps=6)
    run = Run(train(config, tmp_path / "run", progress=False).folder)
    rates = [record["lr"] for record in run.metrics() if record["kind"] == "train"]
    assert rates[0] > 0
    assert rates[2] == 6e-4
    assert rates[2] > rates[3] > rates[4] > rates[5]


@pytest.mark.case(29)
@pytest.mark.parametrize("shard", ["train-00000.tokens.npy", "train-00000.supervised.npy", "dev-00000.tokens.npy"])
def test_changed_byte_in_the_data_names_the_shard(tiny: Make, sums: Path, tmp_path: Path, shard: str) -> None:
    data = shutil.copytree(sums, tmp_path / "data")
    config = tiny(data=data)
    path = data / shard
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match=re.escape(shard)):
        train(config, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.case(29)
def test_changed_manifest_stops_a_resumed_run(tiny: Make, sums: Path, tmp_path: Path) -> None:
    data = shutil.copytree(sums, tmp_path / "data")
    config = tiny(data=data)
    train(config, tmp_path / "run", stop_after=2, progress=False)
    shutil.rmtree(data)
    prepare_sums(data, seed=1)
    with pytest.raises(ValueError, match=r"the manifest hashes to .*\.\., data_sha256 is"):
        train(config, tmp_path / "run", resume=True, progress=False)


@pytest.mark.case(26)
def test_epochs_end_on_time(tiny: Make, tmp_path: Path, sample_ids: list[int]) -> None:
    config = tiny(epochs=3, batch_size=8)
    result = train(config, tmp_path / "run", progress=False)
    rows = len(set(sample_ids))
    assert rows % 8 != 0
    assert result.step == -(-3 * rows // 8)
    epochs = [sample_ids[start : start + rows] for start in range(0, 3 * rows, rows)]
    assert len(sample_ids) == 3 * rows
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_not_a_number_stops_the_run_by_step_and_checkpoint(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    config = tiny(checkpoint_every=2, evaluate_every=12)
    straight = Run(train(config, tmp_path / "straight", progress=False).folder)
    original = Loader.batch
    poisoned = 5 * config.batch_size

    def batch(self: Loader, start: int, count: int | None = None) -> Batch:
        if start == poisoned:
            with torch.no_grad():
                if what == "loss":
                    models[-1].norm.weight[0] = torch.nan
                else:
                    models[-1].norm.weight.register_hook(lambda gradient: gradient * torch.inf)
        return original(self, start, count)

    models = []
    build = trainer_module.build_model
    monkeypatch.setattr(trainer_module, "build_model", lambda *a: models.append(build(*a)) or models[-1])
    monkeypatch.setattr(Loader, "batch", batch)
    with pytest.raises(
        TrainingError, match=r"^step 6: .* on samples 20 to 23 \(rows .*\); .*step-00000004.*optimizer\.peak_lr"
    ):
        train(config, tmp_path / "run", progress=False)
    monkeypatch.undo()
    run = Run(tmp_path / "run")
    assert train(config, run.folder, resume=True, progress=False).ended == "finished"
    assert same_bits(weights(run.last()), weights(straight.last()))


def test_weights_that_are_no_numbers_are_never_saved(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = torch.optim.AdamW.step
    taken = []

    def overflow(self: torch.optim.AdamW, *arguments: Any) -> None:
        step(self, *arguments)
        taken.append(1)
        if len(taken) == 4:
            self.param_groups[0]["params"][0].data[0, 0] = torch.inf

    monkeypatch.setattr(torch.optim.AdamW, "step", overflow)
    with pytest.raises(TrainingError, match=r"^step 4: parameter \S+ is not finite; .*step-00000002"):
        train(tiny(checkpoint_every=2, evaluate_every=12), tmp_path / "run", progress=False)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]


def test_best_and_last_are_kept(tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nll = iter([3.0, 2.0, 2.5, 2.5, 2.25, 2.125])
    original = trainer_module.evaluate

    def evaluate(*arguments: Any) -> Any:
        return dataclasses.replace(original(*arguments), nll=next(nll))

    monkeypatch.setattr(trainer_module, "evaluate", evaluate)
    result = train(tiny(evaluate_every=2), tmp_path / "run", progress=False)
    run = Run(tmp_path / "run")
    assert (result.best_step, result.best_nll, result.last_nll) == (4, 2.0, 2.125)
    assert [path.name for path in checkpoint.checkpoints(run.checkpoints)] == ["step-00000004", "step-00000012"]
    assert (run.best().name, run.last().name) == ("step-00000004", "step-00000012")
    assert [r["best"] for r in run.metrics() if r["kind"] == "evaluation"] == [True, True, False, False, False, False]


def test_another_configuration_is_refused_by_field(tiny: Make, tmp_path: Path) -> None:
    train(tiny(), tmp_path / "run", stop_after=2, progress=False)
    with pytest.raises(ConfigError, match=r"optimizer\.peak_lr is 0\.5 here and 0\.002 there"):
        train(tiny("optimizer.peak_lr=0.5"), tmp_path / "run", resume=True, progress=False)
    with pytest.raises(ConfigError, match=r"steps is 13 here and 12 there"):
        train(tiny(steps=13), tmp_path / "run", resume=True, progress=False)


def test_foreign_checkpoint_is_refused_by_field(tiny: Make, tmp_path: Path) -> None:
    mine = train(tiny(), tmp_path / "mine", stop_after=2, progress=False).folder
    other = train(tiny(model_seed=23), tmp_path / "other", stop_after=4, progress=False).folder
    shutil.copytree(other / "checkpoints" / "step-00000004", mine / "checkpoints" / "step-00000004")
    with pytest.raises(ConfigError, match=r"checkpoint .*step-00000004 has .* model_seed is 17 here and 23 there"):
        train(tiny(), mine, resume=True, progress=False)


def test_moved_data_does_not_matter(tiny: Make, sums: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(sums, tmp_path / "moved")
    train(tiny(), tmp_path / "run", stop_after=2, progress=False)
    assert train(tiny(data=moved), tmp_path / "run", resume=True, progress=False).ended == "finished"
    assert Run(tmp_path / "run").config.data == str(moved)


def test_a_run_is_not_overwritten(tiny: Make, tmp_path: Path) -> None:
    train(tiny(), tmp_path / "run", stop_after=1, progress=False)
    with pytest.raises(ValueError, match="already holds a run; go on with --resume"):
        train(tiny(), tmp_path / "run", progress=False)


def test_somebody_elses_folder_is_left_alone(tiny: Make, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds 'notes\.txt' and no run"):
        train(tiny(), tmp_path, progress=False)
    with pytest.raises(ValueError, match="is a file; name a folder"):
        train(tiny(), tmp_path / "notes.txt", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_one_process_a_run(tiny: Make, tmp_path: Path) -> None:
    run = Run(train(tiny(), tmp_path / "run", stop_after=1, progress=False).folder)
    with locked(run.folder), pytest.raises(ValueError, match="is being written by another process"):
        train(tiny(), run.folder, resume=True, progress=False)
    assert train(tiny(), run.folder, resume=True, progress=False).ended == "finished"


def test_full_disk_under_the_metrics(tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: MetricsWriter, record: dict[str, Any]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    straight = Run(train(tiny(), tmp_path / "straight", progress=False).folder)
    run = Run(train(tiny(), tmp_path / "run", stop_after=4, progress=False).folder)
    monkeypatch.setattr(MetricsWriter, "write", full)
    with pytest.raises(TrainingError, match=r"No space left on device; mend that and go on with --resume"):
        train(tiny(), run.folder, resume=True, progress=False)
    monkeypatch.undo()
    assert train(tiny(), run.folder, resume=True, progress=False).ended == "finished"
    assert timeless(run) == timeless(straight)
    assert same_bits(weights(run.last()), weights(straight.last()))


def test_a_rotating_width_turns_with_the_steps(tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turned: list[int | None] = []
    rotate = LanguageModel.rotate
    monkeypatch.setattr(LanguageModel, "rotate", lambda self, offset: turned.append(offset) or rotate(self, offset))
    config = tiny("model.segments=3", steps=4, evaluate_every=2)
    straight = Run(train(config, tmp_path / "straight", progress=False).folder)
    assert turned == [1, 2, 0, 3, 4, 0]
    train(config, tmp_path / "parts", stop_after=3, progress=False)
    parts = Run(train(config, tmp_path / "parts", resume=True, progress=False).folder)
    assert same_bits(weights(parts.last()), weights(straight.last()))


def test_resume_before_the_first_checkpoint_starts_over(tiny: Make, tmp_path: Path) -> None:
    config = tiny()
    straight = Run(train(config, tmp_path / "straight", progress=False).folder)
    run = Run.create(tmp_path / "run", config)
    run.metrics_path.write_text('{"kind": "train", "step": 1, "loss": 1')  # killed in its first step
    assert train(config, run.folder, resume=True, progress=False).ended == "finished"
    assert timeless(run) == timeless(straight)


def test_finished_run_stays_as_it_is(tiny: Make, tmp_path: Path) -> None:
    config = tiny()
    run = Run(train(config, tmp_path / "run", progress=False).folder)
    before = {path.name: path.stat().st_mtime_ns for path in run.last().iterdir()}
    metrics = run.metrics()
    result = train(config, run.folder, resume=True, progress=False)
    assert (result.ended, result.step, result.exit_code) == ("finished", 12, 0)
    assert {path.name: path.stat().st_mtime_ns for path in run.last().iterdir()} == before
    assert run.metrics() == metrics


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # its compiler uses what it deprecates
def test_compiled_passes_train_alike(tiny: Make, tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler here")
    eager = Run(train(tiny(steps=6), tmp_path / "eager", progress=False).folder)
    compiled = Run(train(tiny(steps=6, compile=True), tmp_path / "compiled", progress=False).folder)
    assert losses(compiled) == pytest.approx(losses(eager), rel=1e-4)


def test_stop_after_must_be_a_step(tiny: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stop_after must be at least 1 step, got 0"):
        train(tiny(), tmp_path / "run", stop_after=0)


SLOW = textwrap.dedent(
    """
    import sys, time, torch
    from tangolm.data.loader import Loader
    from tangolm.training import Run, train
    torch.set_num_threads(1)
    batch = Loader.batch
    def slow(*arguments):
        time.sleep(0.1)
        return batch(*arguments)
    Loader.batch = slow
    result = train(Run(sys.argv[1]).config, sys.argv[1], resume=True)
    print(result.message)
    sys.exit(result.exit_code)
    """
)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_signal_saves_and_says_how_to_go_on(tiny: Make, tmp_path: Path, number: signal.Signals, code: int) -> None:
    config = tiny(steps=60, evaluate_every=30)
    straight = Run(train(config, tmp_path / "straight", progress=False).folder)
    run = Run.create(tmp_path / "run", config)
    child = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(run.folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 120
        while len(run.metrics()) < 3 and time.monotonic() < deadline and child.poll() is None:
            time.sleep(0.02)
        child.send_signal(number)
        said, shown = child.communicate(timeout=120)
    finally:
        child.kill()
    assert child.returncode == code, shown
    assert re.search(rf"interrupted at step \d+ of 60, saved; go on with: .*--resume --out {run.folder}", said)
    state = checkpoint.verify(run.last())
    assert 3 <= state.step < 60
    assert len(losses(run)) == state.step
    assert train(config, run.folder, resume=True, progress=False).ended == "finished"
    assert losses(run) == losses(straight)
    assert same_bits(weights(run.last()), weights(straight.last()))

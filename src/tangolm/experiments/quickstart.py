"""Quickstart: TANGO and a Loop Transformer++ of equal size on the same mathematics questions, in minutes on a CPU.

OUT/data                  the prepared questions
    runs/tango-mini-d4    a run each, of the same sequences in the same order
    runs/loop-mini-d4

Both are judged on held-out questions by the checkpoint with the lowest development NLL. Whatever is finished is kept: called
again, it goes on where it was.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from tangolm.data import Loader, Progress, no_progress, open_split, prepare, read_manifest
from tangolm.experiments.answers import answer_run
from tangolm.training import Result, Run, RunConfig, checkpoint, run_config, train
from tangolm.training.memory import peak_memory_bytes

DATASET = "dm-mathematics"
MODEL_SEED, DATA_SEED = 17, 101


@dataclass(frozen=True)
class Size:
    """How much of everything.

    Args:
        train_per_source, dev_per_module, test_per_module: questions, see `prepare dm-mathematics`.
        tokens: positions that each model trains on, padding included.
        batch_size: sequences of a step.
        presets: the models.
        modules: of mathematics; all 56 where empty.
        overrides: of the runs' configurations, as `tangolm train --set` takes them.
    """

    train_per_source: int
    dev_per_module: int
    test_per_module: int
    tokens: int
    batch_size: int
    presets: tuple[str, ...] = ("tango-mini-d4", "loop-mini-d4")
    modules: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


# In so few tokens small steps learn most. Tried with the Loop Transformer++ alone, so that it is not the one that is at a
# disadvantage: batch 8 at 2e-3, 4 at 2e-3, 4 at 4e-3 and 2 at 4e-3 gave development NLL 1.982, 1.890, 1.868 and 1.875.
FEW_TOKENS = ("optimizer.peak_lr=0.004",)
FULL = Size(
    train_per_source=54,
    dev_per_module=6,
    test_per_module=18,
    tokens=800_000,
    batch_size=4,
    overrides=FEW_TOKENS,
)
SMALL = Size(
    train_per_source=8,
    dev_per_module=3,
    test_per_module=3,
    tokens=80_000,
    batch_size=4,
    overrides=(*FEW_TOKENS, "evaluate_every=20"),
)


@dataclass(frozen=True)
class QuickstartResult:
    """What a quickstart left.

    Args:
        folder: of all of it.
        data: folder of the questions.
        runs: folders of the runs that were begun.
        interrupted: how training ended where a signal stopped it; None where everything is finished.
        trained: whether this call trained (a finished quickstart only shows its results again).
        seconds: that this call took.
        peak_memory_bytes: of this process since it started; None where the system does not say.
    """

    folder: Path
    data: Path
    runs: tuple[Path, ...]
    interrupted: Result | None
    trained: bool
    seconds: float
    peak_memory_bytes: int | None

    @property
    def message(self) -> str | None:
        """One line on how to go on, where there is something left to do."""
        if self.interrupted is None:
            return None
        stopped = self.interrupted
        return (
            f"interrupted at step {stopped.step} of {stopped.steps} of {stopped.folder.name}, saved; "
            f"go on with: tangolm quickstart --out {self.folder}"
        )

    @property
    def exit_code(self) -> int:
        """0, or what a shell expects of a process that a signal ended."""
        return 0 if self.interrupted is None else self.interrupted.exit_code


def run(
    out: str | os.PathLike[str],
    small: bool = False,
    progress: Progress | None = None,
    *,
    size: Size | None = None,
    stop_after: int | None = None,
) -> QuickstartResult:
    """Prepare, train, evaluate, answer; or whatever of it is left to do in `out`.

    Args:
        out: a new or empty folder, or that of an earlier quickstart of the same size.
        small: about a minute instead of minutes, for a look and for automatic tests.
        progress: called with (done, total, what) while questions are made and answered; training then shows its own
            progress on stderr. None: all silent.
        size: another size than these two.
        stop_after: end as an interruption would, after so many training steps.

    Raises:
        ValueError: a folder that holds something else or a quickstart of another size; data or a checkpoint that is
            damaged.
    """
    started = time.monotonic()
    size = size or (SMALL if small else FULL)
    folder = Path(out)
    data = _prepared(folder, size, progress or no_progress)
    configs = {name: _config(name, data, size) for name in size.presets}
    _check_same_batches(list(configs.values()))
    runs: list[Path] = []
    interrupted, trained = None, False
    for name, config in configs.items():
        place = folder / "runs" / name
        runs.append(place)
        if not _finished(place, config):
            trained = True
            result = train(config, place, resume=True, stop_after=stop_after, progress=progress is not None)
            if result.ended != "finished":
                interrupted = result
                break
    else:
        _check_same_samples(runs)
        for place in runs:
            answer_run(Run(place), progress=_named(progress, place.name))
    return QuickstartResult(
        folder, data, tuple(runs), interrupted, trained, time.monotonic() - started, peak_memory_bytes()
    )


def _prepared(folder: Path, size: Size, progress: Progress) -> Path:
    """The data folder, prepared unless it is already."""
    data = folder / "data"
    options = {
        "train_per_source": size.train_per_source,
        "dev_per_module": size.dev_per_module,
        "test_per_module": size.test_per_module,
        "modules": list(size.modules),
    }
    if not (data / "manifest.json").exists():
        prepare(DATASET, None, data, progress=progress, **options)
        return data
    manifest = read_manifest(data)
    arguments = manifest.get("arguments", {})
    if manifest["dataset"] != DATASET or any(arguments.get(name) != value for name, value in options.items()):
        raise ValueError(
            f"out {str(folder)!r} holds data of something else or of a quickstart of another size; name another --out"
        )
    return data


def _config(name: str, data: Path, size: Size) -> RunConfig:
    return run_config(
        name,
        data,
        size.overrides,
        tokens=size.tokens,
        batch_size=size.batch_size,
        model_seed=MODEL_SEED,
        data_seed=DATA_SEED,
    )


def _finished(place: Path, config: RunConfig) -> bool:
    """Whether the run is there, of this configuration and at its last step."""
    if not Run.exists(place):
        return False
    run = Run(place)
    if run.config.run_id != config.run_id or checkpoint.newest(run.checkpoints) is None:
        return False  # `train` goes on, or says in which fields they differ
    steps = config.budget(read_manifest(config.data)["splits"]["train"]["rows"]).steps
    return checkpoint.read_state(run.last()).step == steps


def _check_same_batches(configs: list[RunConfig]) -> None:
    """The models read the same rows in the same order."""
    orders = set()
    for config in configs:
        split = open_split(config.data, "train")
        loader = Loader(split, config.batch_size, config.data_seed)
        samples = config.budget(split.rows).samples
        orders.add((config.batch_size, tuple(loader.row_of(sample) for sample in range(samples))))
    assert len(orders) == 1, "the models would be trained on different batches"


def _check_same_samples(runs: list[Path]) -> None:
    """What the runs recorded: after each step both have seen the same number of samples and supervised tokens."""
    seen = {
        tuple(
            (record["step"], record["samples"], record["supervised_tokens"])
            for record in Run(place).metrics()
            if record["kind"] == "train"
        )
        for place in runs
    }
    assert len(seen) == 1, "the models were trained on different batches"


def _named(progress: Progress | None, name: str) -> Progress | None:
    if progress is None:
        return None
    return lambda done, total, what: progress(done, total, f"{name}: {what}")

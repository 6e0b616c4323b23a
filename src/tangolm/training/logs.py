"""Where a run's records go besides `metrics.jsonl`: programs that draw curves while it trains, by name.

"tensorboard" writes event files into RUN/tensorboard; "wandb" sends to Weights & Biases, one of its runs a folder and
configuration (both are in its id). A resumed run goes on in both: TensorBoard forgets the steps that are done again, wandb passes
them over.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from tangolm.config import ConfigError, fingerprint, to_dict
from tangolm.training.run import RunConfig

PREFIXES = {"train": "train", "evaluation": "dev", "spike": "spike", "diverged": "diverged"}
INSTALL = {
    "tensorboard": ("torch.utils.tensorboard", "pip install 'tangolm[logging]'"),
    "wandb": ("wandb", "pip install wandb"),
}


class Log(Protocol):
    """Takes the records of a run, which are those of `metrics.jsonl`."""

    def write(self, record: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Scalars in event files of the run's folder."""

    def __init__(self, config: RunConfig, folder: Path, step: int) -> None:
        self._writer = _module("tensorboard").SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Scalars for Weights & Biases, as its own settings say: sent, or kept with WANDB_MODE=offline."""

    def __init__(self, config: RunConfig, folder: Path, step: int) -> None:
        self._run = _module("wandb").init(
            project="tangolm",
            id=f"{config.run_id}-{fingerprint(str(folder.resolve()))}",  # of this folder: another may hold the same run
            name=folder.resolve().name,
            dir=str(folder),
            config=to_dict(config),
            resume="allow",
        )

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log(scalars(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()


LOGS: dict[str, Callable[[RunConfig, Path, int], Log]] = {"tensorboard": TensorBoard, "wandb": WandB}


def require(config: RunConfig) -> None:
    """Refuse a log whose package is not installed, by name."""
    for name in config.log:
        _module(name)


def open_logs(config: RunConfig, folder: Path, step: int) -> list[Log]:
    """The logs of a run that goes on behind `step`."""
    return [LOGS[name](config, folder, step) for name in config.log]


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by path: "train/loss", "dev/nll", "dev/sources/NAME", "dev/temperatures/block 0/3"."""
    return dict(_numbers(record, PREFIXES[record["kind"]]))


def _numbers(value: Any, where: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in ("step", "sample_ids"):
                yield from _numbers(inner, f"{where}/{name}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _numbers(inner, f"{where}/{index}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield where, value


def _module(name: str) -> Any:
    module, remedy = INSTALL[name]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"log {name!r} needs a package that is not installed ({error}): {remedy}") from error

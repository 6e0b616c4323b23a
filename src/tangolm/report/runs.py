"""What the files of a run say: the facts that tables, curves and pages show. A part that is missing is None."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tangolm.config import to_dict
from tangolm.data import data_sha256, read_data
from tangolm.experiments.answers import NAME as ANSWERS
from tangolm.training import Run, RunConfig, median_update_seconds
from tangolm.training.metrics import WARMUP_UPDATES
from tangolm.training.run import FREE


@dataclass(frozen=True)
class RunRecord:
    """A run as its files tell it.

    Args:
        name: short, unique among the runs that were read together.
        folder, config: the run's.
        metrics: the records of `metrics.jsonl`.
        environment: what the last start recorded.
        dev, test: kept evaluations of the selected checkpoint.
        answers: kept generated answers.
        manifest: of the data, where it is still there and unchanged.
    """

    name: str
    folder: Path
    config: RunConfig
    metrics: tuple[dict[str, Any], ...]
    environment: dict[str, Any] | None
    dev: dict[str, Any] | None
    test: dict[str, Any] | None
    answers: dict[str, Any] | None
    manifest: dict[str, Any] | None

    @property
    def architecture(self) -> str:
        """Its name in tables and legends."""
        model = self.config.model
        if model.architecture == "tango":
            return "TANGO"
        if model.architecture == "transformer":
            return f"{'Loop' if model.looped else 'Untied'} Transformer++"
        return model.architecture

    @cached_property
    def updates(self) -> list[dict[str, Any]]:
        """Records of optimizer steps."""
        return [record for record in self.metrics if record["kind"] == "train"]

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """Records of development evaluations."""
        return [record for record in self.metrics if record["kind"] == "evaluation" and record["split"] == "dev"]

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.updates[-1]["step"] if self.updates else 0

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the whole run; None where that depends on data that is gone."""
        if self.config.epochs is not None and self.manifest is None:
            return None
        rows = self.manifest["splits"]["train"]["rows"] if self.manifest else 0
        return self.config.budget(rows).steps

    @property
    def finished(self) -> bool:
        """Whether the last step is done and evaluated."""
        evaluated = bool(self.evaluations) and self.evaluations[-1]["step"] == self.step
        return evaluated and (self.step == self.steps or bool(self.test and self.test.get("finished")))

    @property
    def state(self) -> str:
        """In words: finished, or how far it is."""
        if self.finished:
            return f"finished, {self.step:,} steps"
        if not self.updates:
            return "not begun"
        return f"unfinished: step {self.step:,} of {'?' if self.steps is None else f'{self.steps:,}'}"

    @cached_property
    def tokens_at(self) -> dict[int, int]:
        """Step -> positions trained on up to it."""
        seen, total = {}, 0
        for record in self.updates:
            total += record["tokens"]
            seen[record["step"]] = total
        return seen

    @property
    def tokens(self) -> int | None:
        """Positions trained on."""
        return self.tokens_at[self.step] if self.updates else None

    @property
    def best(self) -> dict[str, Any] | None:
        """The evaluation with the lowest development NLL."""
        return min(self.evaluations, key=lambda record: record["nll"], default=None)

    @property
    def last(self) -> dict[str, Any] | None:
        """The last development evaluation."""
        return self.evaluations[-1] if self.evaluations else None

    @property
    def tokens_per_second(self) -> float | None:
        """Median of synchronised updates, data and evaluation not in it."""
        seconds = median_update_seconds(self.updates)
        return statistics.median(record["tokens"] for record in self.updates) / seconds if seconds else None

    @property
    def peak_memory_bytes(self) -> int | None:
        """The most that any start of it took; None where the device does not say."""
        recorded = [record.get("memory_bytes") for record in self.updates]
        recorded.append((self.environment or {}).get("peak_memory_bytes"))
        return max((peak for peak in recorded if peak is not None), default=None)

    @property
    def operations_per_second(self) -> float | None:
        """Median of the model operations of settled updates; None in runs of a version that did not record them."""
        settled = self.updates[WARMUP_UPDATES:] or self.updates
        rates = [record["operations_per_s"] for record in settled if "operations_per_s" in record]
        return statistics.median(rates) if rates else None

    @property
    def temperatures(self) -> tuple[list[float], list[float]] | None:
        """tau of all heads at the first and the last evaluation."""
        found = [record["temperatures"] for record in self.evaluations if "temperatures" in record]
        if not found:
            return None
        first, last = ([tau for block in one.values() for tau in block] for one in (found[0], found[-1]))
        return first, last

    def configuration(self, base: Path) -> dict[str, Any]:
        """The configuration as JSON data, the place of the data relative to the folder `base`."""
        return {**to_dict(self.config), "data": relative(Path(self.config.data), base)}

    def group(self) -> str:
        """Equal for runs whose numbers differ in their seeds only."""
        fields = {**to_dict(self.config), **dict.fromkeys((*FREE, "model_seed", "data_seed"))}
        return json.dumps(fields, sort_keys=True)


def read_run(folder: str | os.PathLike[str], name: str | None = None) -> RunRecord:
    """Read a run's folder.

    Raises:
        ValueError: not the folder of a run, or a damaged file in it, by name.
    """
    run = Run(folder)
    return RunRecord(
        name=name or run.folder.resolve().name,
        folder=run.folder,
        config=run.config,
        metrics=tuple(run.metrics()),
        environment=run.environment(),
        dev=run.evaluation("dev"),
        test=run.evaluation("test"),
        answers=run.evaluation(Path(ANSWERS).stem),
        manifest=_manifest(run.config),
    )


def read_runs(folders: Sequence[str | os.PathLike[str]]) -> list[RunRecord]:
    """Read several runs; where two folders have one name, their parents' names come before it.

    Raises:
        ValueError: none given, one given twice, or as `read_run`.
    """
    if not folders:
        raise ValueError("runs is empty; give the folder of at least one run")
    places = [Path(folder).resolve() for folder in folders]
    for place in places:
        if places.count(place) > 1:
            raise ValueError(f"run {place.name!r} is given twice; name each folder once")
    parts = 1
    while len({place.parts[-parts:] for place in places}) < len(places):
        parts += 1
    return [read_run(folder, "/".join(place.parts[-parts:])) for folder, place in zip(folders, places, strict=True)]


def relative(path: Path, base: Path) -> str:
    """`path` as seen from the folder `base`; its name alone where no relative path leads there."""
    try:
        return Path(os.path.relpath(path.resolve(), base.resolve())).as_posix()
    except ValueError:  # another drive
        return path.name


def _manifest(config: RunConfig) -> dict[str, Any] | None:
    try:
        manifest = read_data(config.data)
        return manifest if data_sha256(config.data) == config.data_sha256 else None
    except ValueError:  # moved, deleted or prepared anew: the run is still worth a page
        return None

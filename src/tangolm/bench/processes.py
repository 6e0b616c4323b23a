"""Training in several processes against one, on the cores of this machine: tokens a second, and the losses beside.

What is run is `tangolm train`, alone and under `torchrun`, on recall rows made for it; each process has its part of the cores
as threads. Runs take turns, and figures are medians over the rounds, the first updates of each run left out.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from tangolm.bench.bars import Bar
from tangolm.bench.machine import Machine
from tangolm.bench.training import train
from tangolm.data import prepare
from tangolm.models import preset
from tangolm.training import median_update_seconds, run_config

SAME_STEPS = 4  # of which the losses are compared: rounding grows with training


@dataclass(frozen=True)
class Options:
    """What is measured.

    Raises:
        ValueError: a size out of range, an unknown preset.
    """

    model: str = "tango-mini-d4"
    processes: int = 2
    parallel: Literal["ddp", "fsdp"] = "ddp"
    tokens: int = 256
    batch: int = 8
    steps: int = 10
    repeats: int = 2

    def __post_init__(self) -> None:
        for name, least in (("processes", 2), ("tokens", 256), ("batch", self.processes), ("repeats", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.steps <= SAME_STEPS:
            raise ValueError(f"steps must be above {SAME_STEPS}, got {self.steps}")
        if self.parallel not in ("ddp", "fsdp"):
            raise ValueError(f"parallel must be ddp or fsdp, got {self.parallel!r}")
        preset(self.model)


@dataclass(frozen=True)
class ProcessesResult:
    """`relative`: tokens a second of all processes over those of one; `difference`: the largest of the first losses, relative."""

    options: Options
    machine: Machine
    tokens_per_s: tuple[float, float]
    relative: float
    difference: float

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values for JSON."""
        return {"benchmark": "processes", **asdict(self)}


BARS = (Bar("first losses, relative difference", ("processes",), lambda result: result.difference, 1e-6, at_most=True),)


def run(options: Options) -> ProcessesResult:
    """Train in turn.

    Raises:
        RuntimeError: a training that failed, with what it said.
    """
    batches, losses = options.batch * options.tokens, {}
    rates: dict[int, list[float]] = {1: [], options.processes: []}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        prepare("recall", None, place / "data", context=options.tokens, train_rows=options.batch * options.steps)
        fields = {"steps": options.steps, "batch_size": options.batch, "device": "cpu"}
        fields |= {"evaluate_every": options.steps, "evaluation_rows": 1}
        alone = run_config(options.model, place / "data", [f"{name}={value}" for name, value in fields.items()])
        configs = {1: alone, options.processes: replace(alone, parallel=options.parallel)}
        for number in range(options.repeats):
            for processes, own in rates.items():
                metrics = train(configs[processes], place / f"{number}-{processes}", processes).metrics()
                records = [record for record in metrics if record["kind"] == "train"]
                losses[processes] = [record["loss"] for record in records[:SAME_STEPS]]
                own.append(batches / (median_update_seconds(records) or float("nan")))
    one, several = rates.values()
    pairs = zip(*losses.values(), strict=True)
    return ProcessesResult(
        options=options,
        machine=Machine.describe(),
        tokens_per_s=(median(one), median(several)),
        relative=median(after / before for before, after in zip(one, several, strict=True)),
        difference=max(abs(ours - alone) / abs(alone) for alone, ours in pairs),
    )


def render(result: ProcessesResult) -> list[str]:
    """Lines for a terminal: Markdown."""
    options, (one, several) = result.options, result.tokens_per_s
    return [
        f"training of {options.model}, B {options.batch}, T {options.tokens:,}, float32, {result.machine}",
        "",
        "| processes | tokens/s | over one | first losses differ by |",
        "|---|---|---|---|",
        f"| 1 | {one:,.0f} | 1.00 | 0 |",
        f"| {options.processes} ({options.parallel}) | {several:,.0f} | {result.relative:.2f} | {result.difference:.1e} |",
    ]

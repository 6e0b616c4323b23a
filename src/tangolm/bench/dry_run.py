"""What a dry run says that a run costs, against what the run then takes: peak memory, seconds of a step and of the whole.

Probes and runs of some steps take turns, each in a process of its own; a run is compared with the mean of the probes before and
behind it, so that a drift of the machine cancels. Figures are medians over runs of probed / measured. The whole is all updates
and evaluations, the first ones included.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tangolm.bench.bars import Bar
from tangolm.bench.machine import Machine
from tangolm.bench.training import train
from tangolm.data import recall
from tangolm.training import RunConfig, median_update_seconds, plan, run_config

CASES: dict[str, tuple[str, tuple[str, ...]]] = {  # preset and fields of a run
    "tango": ("tango-mini-d4", ("batch_size=8",)),
    "loop": ("loop-mini-d4", ("batch_size=8",)),
    "windowed": ("windowed-tango-mini-d4", ("batch_size=8", "micro_batch=2", "recompute=true")),
}
DATA = recall.RecallOptions(context=256, train_rows=96, dev_rows=16, test_rows=8)
NEAR = 0.2  # how far a figure of the probe may be from the measured one


@dataclass(frozen=True)
class Options:
    """What is compared.

    Raises:
        ValueError: an unknown case, fewer steps than warm up, no round.
    """

    cases: tuple[str, ...] = tuple(CASES)
    steps: int = 8
    repeats: int = 3

    def __post_init__(self) -> None:
        for case in self.cases:
            if case not in CASES:
                raise ValueError(f"cases has {case!r}; known: {', '.join(CASES)}")
        if not self.cases:
            raise ValueError(f"cases is empty; known: {', '.join(CASES)}")
        if self.steps < 4:
            raise ValueError(f"steps must be at least 4, of which the first three warm up, got {self.steps}")
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")


@dataclass(frozen=True)
class Figures:
    """Of a run as probed or as measured; memory is None where the system does not say."""

    peak_bytes: int | None
    step_seconds: float
    total_seconds: float


@dataclass(frozen=True)
class Row:
    """A case: what the last round said, and medians over rounds of probed / measured."""

    case: str
    probed: Figures
    measured: Figures
    peak: float | None
    step: float
    total: float


BARS = tuple(
    Bar(f"{case}: probed {name} / measured", (case,), figure, limit, at_most)
    for case in CASES
    for name, figure in (
        ("peak memory", lambda row: row.peak),
        ("seconds a step", lambda row: row.step),
        ("seconds in all", lambda row: row.total),
    )
    for limit, at_most in ((1 - NEAR, False), (1 + NEAR, True))
)


@dataclass(frozen=True)
class DryRunResult:
    options: Options
    machine: Machine
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values for JSON."""
        return {"benchmark": "dry-run", **asdict(self)}


def run(options: Options) -> DryRunResult:
    """Probe and train each case in turn.

    Raises:
        ValueError, RuntimeError: a probe or a run that does not get through.
    """
    rounds: dict[str, list[tuple[Figures, Figures]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        recall.prepare(None, data, DATA)
        for case in options.cases:
            preset, fields = CASES[case]
            fixed = (f"steps={options.steps}", f"evaluate_every={options.steps // 2}")
            config = run_config(preset, data, [*fixed, *fields])
            before = _probed(config)
            rounds[case] = []
            for number in range(options.repeats):
                measured, behind = _measured(config, Path(folder) / f"{case}-{number}"), _probed(config)
                rounds[case].append((_mean(before, behind), measured))
                before = behind
    rows = []
    for case, pairs in rounds.items():
        memory = [a.peak_bytes / b.peak_bytes for a, b in pairs if a.peak_bytes and b.peak_bytes]
        rows.append(
            Row(
                case,
                *pairs[-1],
                peak=median(memory) if memory else None,
                step=median(a.step_seconds / b.step_seconds for a, b in pairs),
                total=median(a.total_seconds / b.total_seconds for a, b in pairs),
            )
        )
    return DryRunResult(options, Machine.describe(), tuple(rows))


def render(result: DryRunResult) -> list[str]:
    """Lines for a terminal: Markdown."""
    lines = [
        f"dry run against {result.options.steps} steps, T {DATA.context}, {result.machine}",
        "",
        "| run | peak memory, MB: probed, measured | ratio | s a step | ratio | s in all | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result.rows:
        a, b = row.probed, row.measured
        memory = ", ".join("n/a" if f.peak_bytes is None else f"{f.peak_bytes / 1e6:,.0f}" for f in (a, b))
        peak = "n/a" if row.peak is None else f"{row.peak:.2f}"
        lines.append(
            f"| {row.case} | {memory} | {peak} | {a.step_seconds:.3f}, {b.step_seconds:.3f} | {row.step:.2f} | "
            f"{a.total_seconds:.2f}, {b.total_seconds:.2f} | {row.total:.2f} |"
        )
    return lines


def _probed(config: RunConfig) -> Figures:
    probe = plan(config, probe=True)["probe"]
    return Figures(probe["peak_memory_bytes"], probe["seconds_per_step"], 3600 * probe["hours_total"])


def _mean(a: Figures, b: Figures) -> Figures:
    return Figures(
        None if a.peak_bytes is None or b.peak_bytes is None else (a.peak_bytes + b.peak_bytes) // 2,
        (a.step_seconds + b.step_seconds) / 2,
        (a.total_seconds + b.total_seconds) / 2,
    )


def _measured(config: RunConfig, folder: Path) -> Figures:
    run = train(config, folder)
    records = run.metrics()
    step = median_update_seconds(records)
    assert step is not None
    total = sum(record["seconds"] for record in records if record["kind"] in ("train", "evaluation"))
    return Figures((run.environment() or {})["peak_memory_bytes"], step, total)

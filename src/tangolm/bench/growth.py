"""How the gate averaging grows with T: forward and backward, at one length after another, each twice the one before.

Full averaging does T^2 work on gates of T, windowed averaging T: time and peak memory at 2T over those at T tend to 4 and to 2
(memory to 2 for both, since no T x T weights are kept). Lengths take turns, and ratios are medians over rounds. Correctness at
such lengths is that of the blocks, which are judged first at a length that crosses several.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from tangolm import ops
from tangolm.bench import op
from tangolm.bench.bars import Bar
from tangolm.bench.machine import Machine, extra_peak_bytes, seconds

WINDOW, FEATURES = 64, 64  # W, and m features a head, of the presets
CHECKED = 3 * WINDOW + 5  # tokens of the comparison that comes first
AGREE = 1e-5  # relative RMS to the reference form in float64


@dataclass(frozen=True)
class Options:
    """What is measured.

    Raises:
        ValueError: a size below 1, an unknown form, lengths that do not double.
    """

    form: Literal["windowed", "full"] = "windowed"
    lengths: tuple[int, ...] = (4096, 8192, 16384, 32768)
    heads: int = 4
    key_width: int = 32
    gate_width: int = 1780
    repeats: int = 3

    def __post_init__(self) -> None:
        for name in ("heads", "key_width", "gate_width", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.form not in ("windowed", "full"):
            raise ValueError(f"form must be windowed or full, got {self.form!r}")
        if len(self.lengths) < 2 or any(b != 2 * a for a, b in pairwise(self.lengths)) or self.lengths[0] < 1:
            raise ValueError(f"lengths must be at least two, each twice the one before, got {self.lengths}")


@dataclass(frozen=True)
class Row:
    """One length; the ratios are to the length before."""

    tokens: int
    seconds: float
    extra_bytes: int | None
    time_ratio: float | None
    memory_ratio: float | None


@dataclass(frozen=True)
class GrowthResult:
    options: Options
    machine: Machine
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values for JSON."""
        return {"benchmark": "growth", **asdict(self)}


def _worst(name: str) -> Callable[[GrowthResult], float | None]:
    def worst(result: GrowthResult) -> float | None:
        ratios = [getattr(row, name) for row in result.rows[1:]]
        return None if None in ratios else max(ratios)

    return worst


WHERE = (("form", "windowed"), ("heads", 4), ("gate_width", 1780), ("lengths", (4096, 8192, 16384, 32768)))
BARS = (
    Bar("windowed, largest time(2T) / time(T)", ("growth",), _worst("time_ratio"), 2.15, True, WHERE),
    Bar("windowed, largest memory(2T) / memory(T)", ("growth",), _worst("memory_ratio"), 2.15, True, WHERE),
)


def run(options: Options) -> GrowthResult:
    """Check, then measure.

    Raises:
        ValueError: results that do not agree with the reference form.
    """
    _check(options)
    times: list[list[float]] = [[] for _ in options.lengths]
    prepare(options, options.lengths[0])()
    for _ in range(options.repeats):
        for own, tokens in zip(times, options.lengths, strict=True):
            call = prepare(options, tokens)  # made anew: together they might not fit
            if tokens == options.lengths[-1] and not own:
                call()  # its memory is new to the process
            own.append(seconds(call))
            del call
    memory = [extra_peak_bytes(prepare, options, tokens) for tokens in options.lengths]
    rows = []
    for n, tokens in enumerate(options.lengths):
        before = memory[n - 1] if n else None
        now = memory[n]
        rows.append(
            Row(
                tokens=tokens,
                seconds=median(times[n]),
                extra_bytes=now,
                time_ratio=median(b / a for a, b in zip(times[n - 1], times[n], strict=True)) if n else None,
                memory_ratio=now / before if now and before else None,
            )
        )
    return GrowthResult(options, Machine.describe(), tuple(rows))


def prepare(options: Options, tokens: int) -> Callable[[], object]:
    """Inputs, and the call: forward and backward."""
    inputs, grad = _inputs(options, tokens)

    def call() -> None:
        out = _average(options, inputs, "auto")
        torch.autograd.grad(out, inputs, grad)

    return call


def render(result: GrowthResult) -> list[str]:
    """Lines for a terminal: Markdown."""
    options = result.options
    lines = [
        f"{options.form} averaging, forward and backward, H {options.heads}, D {options.key_width}, E {options.gate_width}, "
        f"float32, {result.machine}",
        "",
        "| T | s | over the T before | peak memory, MB | over the T before |",
        "|---|---|---|---|---|",
    ]
    for row in result.rows:
        memory = "n/a" if row.extra_bytes is None else f"{row.extra_bytes / 1e6:,.0f}"
        ratios = ["" if ratio is None else f"{ratio:.2f}" for ratio in (row.time_ratio, row.memory_ratio)]
        lines.append(f"| {row.tokens:,} | {row.seconds:.3f} | {ratios[0]} | {memory} | {ratios[1]} |")
    return lines


def _inputs(options: Options, tokens: int) -> tuple[list[Tensor], Tensor]:
    shape = op.Options(1, options.heads, tokens, options.key_width, options.gate_width)
    *tensors, grad = op.inputs(shape, head_major=False)
    return tensors, grad


def _average(options: Options, inputs: list[Tensor], impl: str) -> Tensor:
    if options.form == "full":
        return ops.aggregate_gates(*inputs, impl=impl)
    generator = torch.Generator().manual_seed(0)
    directions = ops.FEATURES["random"](options.heads, FEATURES // 2, options.key_width, generator)
    return ops.aggregate_gates(*inputs, window=WINDOW, features=directions, impl=impl)


def _check(options: Options) -> None:
    ours, grad = _inputs(options, CHECKED)
    exact, wide = [x.detach().double().requires_grad_() for x in ours], grad.double()
    out, expected = _average(options, ours, "auto"), _average(options, exact, "reference")
    found = [out, *torch.autograd.grad(out, ours, grad)]
    right = [expected, *torch.autograd.grad(expected, exact, wide)]
    for a, b in zip(found, right, strict=True):
        error = float(((a.double() - b).norm() / b.norm()).detach())
        if not error < AGREE:
            raise ValueError(f"the averaging differs from the reference form by {error:.1e}; no speed is given")

"""Training steps of several models in turn: time, useful operations, peak memory, beside the first of them.

    useful operations = 2 * 3 * useful MACs        (forward once, backward twice; recomputation never counts)

A model is named by its preset, with a suffix for how it is run: "tango-70m-d4", "tango-70m-d4:recompute" (most activations
formed again in the backward pass) and "tango-70m-d4:naive" (the same weights, the averaging as one would first write it). The
rows of a round run one after the other, so that a slow moment of the machine meets all; figures are medians over rounds. A
naive form's loss and gradients must agree with ours before anything is timed.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tangolm.bench.bars import Bar
from tangolm.bench.machine import Machine, extra_peak_bytes, product_rate, seconds
from tangolm.bench.op import naive_average
from tangolm.models import LanguageModel, build_model, preset
from tangolm.models.tango import AveragingBlock
from tangolm.models.windowed import WindowedTangoBlock

WAYS = ("", "recompute", "naive")
AGREE = 1e-3  # relative RMS between the gradients of two float32 forms


@dataclass(frozen=True)
class Options:
    """What is measured.

    Raises:
        ValueError: a size below 1, no model, an unknown way to run one.
    """

    models: tuple[str, ...]
    tokens: int
    batch: int = 1
    repeats: int = 3
    memory: bool = True

    def __post_init__(self) -> None:
        for name in ("tokens", "batch", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.models:
            raise ValueError("models is empty; name presets, comma-separated")
        for name in self.models:
            way = name.partition(":")[2]
            if way not in WAYS:
                raise ValueError(f"models has {name!r}; behind the colon stands one of: {', '.join(WAYS[1:])}")
            preset(name.partition(":")[0])


@dataclass(frozen=True)
class Row:
    """One model's figures; `relative` is its tokens/s over those of the first model, in the same round."""

    model: str
    macs: int
    useful_operations: int
    seconds: float
    tokens_per_s: float
    relative: float
    fraction: float  # useful operations a second over the product rate
    extra_bytes: int | None  # peak above weights and inputs


def _slower(a: Row, b: Row) -> float:
    return a.seconds / b.seconds


def _more_memory(a: Row, b: Row) -> float | None:
    return None if a.extra_bytes is None or not b.extra_bytes else a.extra_bytes / b.extra_bytes


def _rate(a: Row, b: Row) -> float:
    return a.fraction / b.fraction


LARGE, LONG = "tango-70m-d4", (("tokens", 2048), ("batch", 1))
BARS = (
    Bar("naive time / ours", (f"{LARGE}:naive", LARGE), _slower, 1.5, where=LONG),
    Bar("recomputing, memory / naive's", (f"{LARGE}:recompute", f"{LARGE}:naive"), _more_memory, 0.5, True, LONG),
    Bar("recomputing, time / ours", (f"{LARGE}:recompute", LARGE), _slower, 1.25, True, LONG),
    Bar("useful operations a second / Loop's", (LARGE, "loop-70m-d4"), _rate, 0.95, where=LONG),
    Bar(
        "mini, naive time / ours",
        ("tango-mini-d4:naive", "tango-mini-d4"),
        _slower,
        1.5,
        where=(("tokens", 256), ("batch", 8)),
    ),
    Bar(
        "windowed tokens a second / Loop's",
        ("loop-70m-d4:recompute", "windowed-tango-70m-d4:recompute"),
        _slower,
        0.8,
        where=(("tokens", 8192),),
    ),
)


@dataclass(frozen=True)
class TrainResult:
    options: Options
    machine: Machine
    product_rate: float
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values for JSON."""
        return {"benchmark": "train", **asdict(self)}


def run(options: Options) -> TrainResult:
    """Check, then measure.

    Raises:
        ValueError: a naive form that does not agree with ours.
    """
    for name in options.models:
        if name.endswith(":naive"):
            _check(name.partition(":")[0], options)
    # All models exist at a time, so that their steps can take turns.
    calls = [prepare(name, options) for name in options.models]
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    rates = []
    for _ in range(options.repeats):
        for own, call in zip(times, calls, strict=True):
            own.append(seconds(call))
        rates.append(product_rate(torch.float32))
    del calls
    rate = max(rates)
    rows = []
    for name, own in zip(options.models, times, strict=True):
        macs = preset(name.partition(":")[0], context=options.tokens).macs()
        time = median(own)
        useful = 6 * options.batch * macs["useful_macs"]
        rows.append(
            Row(
                model=name,
                macs=options.batch * macs["macs"],
                useful_operations=useful,
                seconds=time,
                tokens_per_s=options.batch * options.tokens / time,
                relative=median(first / this for first, this in zip(times[0], own, strict=True)),
                fraction=useful / time / rate,
                extra_bytes=extra_peak_bytes(prepare, name, options) if options.memory else None,
            )
        )
    return TrainResult(options, Machine.describe(), rate, tuple(rows))


def prepare(name: str, options: Options) -> Callable[[], object]:
    """The model, its gradients' memory and its batch, and the call: forward, loss, backward."""
    model = _model(name, options)
    ids = torch.randint(model.config.vocab_size, (options.batch, options.tokens), generator=_generator())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def call() -> None:
        loss = model(ids, labels=ids).loss
        loss.backward()

    return call


def render(result: TrainResult) -> list[str]:
    """Lines for a terminal: Markdown."""
    options, rows = result.options, result.rows
    first = rows[0]
    lines = [
        f"training step, B {options.batch}, T {options.tokens:,}, float32, {result.machine}",
        f"product rate {result.product_rate / 1e9:.0f} Gop/s",
        "",
        f"| model | s a step | tokens/s | over {first.model} | useful operations / products | peak memory, MB | MACs ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        memory = "n/a" if row.extra_bytes is None else f"{row.extra_bytes / 1e6:,.0f}"
        lines.append(
            f"| {row.model} | {row.seconds:.3f} | {row.tokens_per_s:,.0f} | {row.relative:.2f} | {row.fraction:.2f} | "
            f"{memory} | {row.macs / first.macs:.2f} |"
        )
    return lines


def naive_aggregate(
    block: AveragingBlock, query: Tensor, key: Tensor, emitted: Tensor, layout: Any, state: Any
) -> Tensor:
    """A block's averaging as one would first write it, head-major."""
    tokens = query.shape[1]
    hidden = torch.ones((tokens, tokens), dtype=torch.bool).triu(1)
    query, key, gate = (x.transpose(1, 2) for x in (query, key, F.silu(emitted)))
    return naive_average(query, key, gate, block.temperature, hidden).transpose(1, 2)


def _model(name: str, options: Options) -> LanguageModel:
    base, _, way = name.partition(":")
    model = build_model(preset(base, context=options.tokens))
    model.recompute(way == "recompute")
    if way == "naive":
        for block in model.blocks:
            if not isinstance(block, AveragingBlock) or isinstance(block, WindowedTangoBlock):
                raise ValueError(f"{base} has no naive form here; TANGO's kinds without a window have one")
            block.aggregate = types.MethodType(naive_aggregate, block)
    return model


def _check(base: str, options: Options) -> None:
    """Compare loss and gradients of the two forms, at 512 tokens at most."""
    small = Options((base,), max(2, min(options.tokens, 512)), 1)
    found = []
    for way in (base, f"{base}:naive"):
        model = _model(way, small)
        ids = torch.randint(model.config.vocab_size, (1, small.tokens), generator=_generator())
        found.append(torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters())))
    for ours, naive in zip(*found, strict=True):
        error = (ours - naive).norm() / naive.norm()
        if not error < AGREE:
            raise ValueError(
                f"{base}: its gradients and those of the naive form differ by {float(error):.1e}; no speed is given"
            )


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)

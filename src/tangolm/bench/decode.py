"""Generation of several models: a step behind so many cached tokens, the prefill, and the full forward it replaces.

A model is named by its preset and, behind an "@", by the tokens that are cached: "tango-70m-d4@2048". A round takes one step of
each; figures are medians over rounds. The step's logits must agree
with those of a forward pass over all tokens before anything is timed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from tangolm.bench.bars import Bar
from tangolm.bench.machine import Machine, seconds
from tangolm.models import build_model, preset

AGREE = 1e-3  # relative to the largest logit


@dataclass(frozen=True)
class Options:
    """What is measured.

    Args:
        full: also time the forward pass over all tokens, which a model without a cache would repeat for every token.

    Raises:
        ValueError: a size below 1, no model, an unknown preset, no number of tokens.
    """

    models: tuple[str, ...]
    repeats: int = 9
    full: bool = True

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")
        if not self.models:
            raise ValueError("models is empty; name presets, comma-separated")
        for name in self.models:
            base, _, tokens = name.partition("@")
            preset(base)
            if not tokens.isdecimal() or int(tokens) < 1:
                raise ValueError(f"models has {name!r}; write how many tokens are cached: {base}@2048")


@dataclass(frozen=True)
class Row:
    """One model's figures; `relative` is its steps/s over those of the first model."""

    model: str
    step_seconds: float
    steps_per_s: float
    relative: float
    prefill_seconds: float
    full_seconds: float | None
    saved: float | None  # full forward over step
    cache_bytes: int


@dataclass(frozen=True)
class DecodeResult:
    options: Options
    machine: Machine
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values for JSON."""
        return {"benchmark": "decode", **asdict(self)}


def _step_ratio(a: Row, b: Row) -> float:
    return a.step_seconds / b.step_seconds


WINDOWED = "windowed-tango-mini-d4"
BARS = (
    Bar("full forward / step", ("tango-70m-d4@2048",), lambda row: row.saved, 40),
    Bar("step at 32,768 tokens / at 256", (f"{WINDOWED}@32768", f"{WINDOWED}@256"), _step_ratio, 1.2, True),
)


class _Model:
    """A model, its filled cache, and what was measured of it."""

    def __init__(self, name: str, options: Options) -> None:
        base, _, tokens = name.partition("@")
        self.name, self.tokens = name, int(tokens)
        self.model = build_model(preset(base, context=self.tokens + options.repeats + 2)).eval()
        self.ids = torch.randint(
            self.model.config.vocab_size, (1, self.tokens + 1), generator=torch.Generator().manual_seed(0)
        )
        self.cache = self.model.new_cache(1)
        self.prefill = seconds(lambda: self.model.hidden(self.ids[:, :-1], cache=self.cache))
        logits = self.model(self.ids[:, -1:], cache=self.cache).logits[0, -1]  # warms up, and makes room in the cache
        if options.full:
            right = self.full()[0]
            error = float((logits - right).abs().max() / right.abs().max())
            if not error < AGREE:
                raise ValueError(f"{name}: step and full forward differ by {error:.1e}; no speed is given")
        self.steps: list[float] = []

    def full(self) -> torch.Tensor:
        """The last token's logits by a forward pass over all."""
        return self.model.logits(self.model.hidden(self.ids)[:, -1])

    def step(self) -> None:
        """Time one step."""
        self.steps.append(seconds(lambda: self.model(self.ids[:, :1], cache=self.cache)))


@torch.no_grad()
def run(options: Options) -> DecodeResult:
    """Check, then measure.

    Raises:
        ValueError: a model whose step does not agree with its full forward pass.
    """
    models = [_Model(name, options) for name in options.models]
    for _ in range(options.repeats):
        for model in models:
            model.step()
    rows = []
    for model in models:
        time = median(model.steps)
        full = median(seconds(model.full) for _ in range(3)) if options.full else None
        rows.append(
            Row(
                model=model.name,
                step_seconds=time,
                steps_per_s=1 / time,
                relative=median(first / own for first, own in zip(models[0].steps, model.steps, strict=True)),
                prefill_seconds=model.prefill,
                full_seconds=full,
                saved=None if full is None else full / time,
                cache_bytes=model.cache.bytes,
            )
        )
    return DecodeResult(options, Machine.describe(), tuple(rows))


def render(result: DecodeResult) -> list[str]:
    """Lines for a terminal: Markdown."""
    first = result.rows[0].model
    lines = [
        f"a step of generation behind so many tokens, float32, {result.machine}",
        "",
        f"| model | ms a step | tokens/s | over {first} | full forward / step | prefill, s | cache, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result.rows:
        saved = "n/a" if row.saved is None else f"{row.saved:.0f}"
        lines.append(
            f"| {row.model} | {row.step_seconds * 1e3:.2f} | {row.steps_per_s:,.0f} | {row.relative:.2f} | {saved} | "
            f"{row.prefill_seconds:.3f} | {row.cache_bytes / 1e6:.2f} |"
        )
    return lines

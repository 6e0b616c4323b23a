"""The gate averaging, forward and backward, beside the naive form: time, share of the product rate, peak memory.

    useful operations = 2 * 3 * B H T (T + 1) / 2 * (D + E)        causal multiply-adds of the forward pass, times three

What is recomputed or computed above the diagonal never counts. The product rate is that of the best square product of the
same dtype in the same run. Times are medians of pairs taken in turn; an error beyond what the judge allows prints none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from operator import attrgetter
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tangolm import ops
from tangolm.bench.bars import Bar
from tangolm.bench.machine import Machine, extra_peak_bytes, product_rate, seconds
from tangolm.config import suggest
from tangolm.ops.compare import Error, compare, draw

SPEEDUP, MEMORY = "naive time / ours", "extra memory / naive's"
FRACTION = "useful operations a second / product rate"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Options:
    """One shape, and how often it is timed.

    Raises:
        ValueError: a size below 1, an unknown dtype or implementation.
    """

    batch: int = 1
    heads: int = 16
    tokens: int = 2048
    key_width: int = 32
    gate_width: int = 1780
    dtype: str = "float32"
    impl: str = "auto"
    repeats: int = 5

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "tokens", "key_width", "gate_width", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not known{suggest(self.dtype, DTYPES)}")
        ops.choose(self.impl)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return self.batch, self.heads, self.tokens, self.key_width, self.gate_width

    @property
    def useful_operations(self) -> int:
        """Of forward and backward; a multiply-add is two."""
        batch, heads, tokens, key_width, gate_width = self.shape
        return 3 * batch * heads * tokens * (tokens + 1) * (key_width + gate_width)


@dataclass(frozen=True)
class OpResult:
    """What was measured; figures are None where the check was red, memory where the system does not tell."""

    options: Options
    impl: str
    machine: Machine
    errors: tuple[Error, ...]
    product_rate: float | None = None
    seconds: float | None = None
    naive_seconds: float | None = None
    speedup: float | None = None  # median over the pairs of naive's time by ours
    extra_bytes: int | None = None
    naive_extra_bytes: int | None = None

    @property
    def correct(self) -> bool:
        return bool(self.errors) and all(error.passed for error in self.errors)

    @property
    def fraction(self) -> float | None:
        """Useful operations a second over the product rate."""
        return self._fraction(self.seconds)

    @property
    def naive_fraction(self) -> float | None:
        return self._fraction(self.naive_seconds)

    @property
    def memory_ratio(self) -> float | None:
        """Extra peak memory over that of the naive form."""
        if self.extra_bytes is None or not self.naive_extra_bytes:
            return None
        return self.extra_bytes / self.naive_extra_bytes

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values for JSON."""
        derived = ("correct", "fraction", "naive_fraction", "memory_ratio")
        return {
            **asdict(self),
            "useful_operations": self.options.useful_operations,
            **{name: getattr(self, name) for name in derived},
        }

    def _fraction(self, time: float | None) -> float | None:
        if time is None or self.product_rate is None:
            return None
        return self.options.useful_operations / time / self.product_rate


def _where(tokens: int, dtype: str) -> tuple[tuple[str, int | str], ...]:
    sizes = {"batch": 1, "heads": 16, "tokens": tokens, "key_width": 32, "gate_width": 1780}
    return (*sizes.items(), ("dtype", dtype))


BARS = tuple(
    Bar(what, ("op",), ratio, limit, at_most, _where(tokens, dtype))
    for tokens, dtype, what, ratio, limit, at_most in (
        (2048, "float32", SPEEDUP, attrgetter("speedup"), 2.0, False),
        (2048, "float32", MEMORY, attrgetter("memory_ratio"), 0.5, True),
        (2048, "float32", FRACTION, attrgetter("fraction"), 0.75, False),
        (4096, "float32", SPEEDUP, attrgetter("speedup"), 2.3, False),
        (4096, "float32", MEMORY, attrgetter("memory_ratio"), 0.35, True),
        (2048, "bfloat16", FRACTION, attrgetter("fraction"), 0.70, False),
    )
)


def run(options: Options) -> OpResult:
    """Check, then measure: one call each to warm up, pairs of ours and naive in turn, memory in fresh processes."""
    impl, machine, dtype = ops.choose(options.impl), Machine.describe(), DTYPES[options.dtype]
    errors = check(options)
    if not all(error.passed for error in errors):
        return OpResult(options, impl, machine, errors)
    ours, naive = prepare_ours(options), prepare_naive(options)
    ours()
    naive()
    pairs, rates = [], [product_rate(dtype)]
    for _ in range(options.repeats):
        pairs.append((seconds(ours), seconds(naive)))
        rates.append(product_rate(dtype))
    del ours, naive
    return OpResult(
        options,
        impl,
        machine,
        errors,
        product_rate=max(rates),
        seconds=median(own for own, _ in pairs),
        naive_seconds=median(other for _, other in pairs),
        speedup=median(other / own for own, other in pairs),
        extra_bytes=extra_peak_bytes(prepare_ours, options),
        naive_extra_bytes=extra_peak_bytes(prepare_naive, options),
    )


def check(options: Options) -> tuple[Error, ...]:
    """The judge's verdict at these tokens and widths, for at most two batch rows and heads."""
    inputs = draw(
        min(options.batch, 2),
        options.tokens,
        min(options.heads, 2),
        options.key_width,
        options.gate_width,
        dtype=DTYPES[options.dtype],
    )
    return compare(options.impl, inputs, orders=1).errors


def naive_average(query: Tensor, key: Tensor, gate: Tensor, temperature: Tensor, hidden: Tensor) -> Tensor:
    """The averages as one would first write them, everything in the inputs' dtype.

    Args:
        query, key: [B, H, T, D], contiguous.
        gate: [B, H, T, E], contiguous.
        temperature: [H].
        hidden: [T, T], True above the diagonal.

    Returns:
        [B, H, T, E].
    """
    scores = torch.matmul(query * temperature[:, None, None], key.transpose(-1, -2))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.matmul(weights, gate)


def prepare_ours(options: Options) -> Callable[[], object]:
    """Inputs as a model has them, [B, T, H, ..], and the call: forward and backward."""
    query, key, gate, temperature, grad = inputs(options, head_major=False)

    def call() -> tuple[Tensor, ...]:
        average = ops.aggregate_gates(query, key, gate, temperature, impl=options.impl)
        return torch.autograd.grad(average, (query, key, gate, temperature), grad)

    return call


def prepare_naive(options: Options) -> Callable[[], object]:
    """Inputs as the naive form likes them, [B, H, T, ..], and the call: forward and backward."""
    query, key, gate, temperature, grad = inputs(options, head_major=True)
    temperature = temperature.detach().to(gate.dtype).requires_grad_()
    hidden = torch.ones((options.tokens, options.tokens), dtype=torch.bool).triu(1)

    def call() -> tuple[Tensor, ...]:
        average = naive_average(query, key, gate, temperature, hidden)
        return torch.autograd.grad(average, (query, key, gate, temperature), grad)

    return call


def render(result: OpResult) -> list[str]:
    """Lines for a terminal."""
    options = result.options
    sizes = "  ".join(f"{name} {size:,}" for name, size in zip("BHTDE", options.shape, strict=True))
    lines = [
        f"gate averaging, forward + backward   {sizes}   {options.dtype}   {result.impl}",
        str(result.machine),
        "error to float64 (the reference's)   "
        + "  ".join(f"{e.name} {e.error:.1e} ({e.reference:.1e})" for e in result.errors),
    ]
    if not result.correct:
        names = ", ".join(error.name for error in result.errors if not error.passed)
        return [*lines, f"WRONG: {names}; no speed is given"]
    lines.append(f"{'':<28}{'ours':>10}{'naive':>10}")
    lines.append(_row("time, ms", result.seconds, result.naive_seconds, 1e3, "8.1f"))
    lines[-1] += f"   {_figure(result.speedup, 1, '.2f')} times faster"
    lines.append(_row("useful operations / products", result.fraction, result.naive_fraction, 1, "8.2f"))
    lines[-1] += f"   of {_figure(result.product_rate, 1e-9, '.0f')} Gop/s"
    lines.append(_row("extra peak memory, MB", result.extra_bytes, result.naive_extra_bytes, 1e-6, "8.0f"))
    lines[-1] += f"   {_figure(result.memory_ratio, 1, '.2f')} of naive's"
    return lines


def inputs(options: Options, *, head_major: bool) -> tuple[Tensor, ...]:
    """Query, key, gate, temperature and the output's gradient, made in place so that no higher peak remains."""
    batch, heads, tokens, key_width, gate_width = options.shape
    outer = (batch, heads, tokens) if head_major else (batch, tokens, heads)
    generator = torch.Generator().manual_seed(0)
    sizes = (key_width, key_width, gate_width, gate_width)
    tensors = [torch.empty((*outer, size), dtype=DTYPES[options.dtype]).normal_(generator=generator) for size in sizes]
    query, key, gate, grad = tensors
    for vectors in (query, key):
        vectors.div_(torch.linalg.vector_norm(vectors, dim=-1, keepdim=True))
    temperature = torch.full((heads,), 12.0)
    query, key, gate, temperature = (tensor.requires_grad_() for tensor in (query, key, gate, temperature))
    return query, key, gate, temperature, grad


def _row(name: str, ours: float | None, naive: float | None, unit: float, form: str) -> str:
    return f"{name:<28}{_figure(ours, unit, form):>10}{_figure(naive, unit, form):>10}"


def _figure(value: float | None, unit: float, form: str) -> str:
    return "n/a" if value is None else format(value * unit, form)

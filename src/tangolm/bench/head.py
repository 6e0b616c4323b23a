"""The head's loss by blocks beside the version with logits: extra peak memory, time, and error to float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tangolm.bench.bars import Bar
from tangolm.bench.machine import Machine, extra_peak_bytes, seconds
from tangolm.ops.loss import head_nll

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Options:
    """One shape.

    Raises:
        ValueError: a size below 1.
    """

    tokens: int = 8192
    width: int = 512
    vocabulary: int = 50_257
    repeats: int = 3

    def __post_init__(self) -> None:
        for name in ("tokens", "width", "vocabulary", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class HeadResult:
    """Errors are relative RMS of [loss, dh, dE] against float64."""

    options: Options
    machine: Machine
    errors: tuple[float, ...]
    logits_errors: tuple[float, ...]
    speedup: float
    seconds: float
    extra_bytes: int | None
    logits_extra_bytes: int | None

    @property
    def memory_ratio(self) -> float | None:
        if self.extra_bytes is None or not self.logits_extra_bytes:
            return None
        return self.extra_bytes / self.logits_extra_bytes

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values for JSON."""
        return {"benchmark": "head", **asdict(self), "memory_ratio": self.memory_ratio}


def _worst(result: HeadResult) -> float:
    return max(ours / theirs for ours, theirs in zip(result.errors, result.logits_errors, strict=True))


SHAPE = (("tokens", 8192), ("vocabulary", 50_257))
BARS = (
    Bar("extra memory / that with logits", ("head",), lambda result: result.memory_ratio, 0.25, True, SHAPE),
    Bar("error / that with logits", ("head",), _worst, 1.5, True, SHAPE),
)


def run(options: Options) -> HeadResult:
    """Errors on at most 256 rows, then time and memory at the whole shape."""
    errors = [_errors(loss, options) for loss in (blocked, with_logits)]
    ours, theirs = prepare(blocked, options), prepare(with_logits, options)
    ours()
    theirs()
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(options.repeats)]
    del ours, theirs
    return HeadResult(
        options,
        Machine.describe(),
        *errors,
        speedup=median(other / own for own, other in pairs),
        seconds=median(own for own, _ in pairs),
        extra_bytes=extra_peak_bytes(prepare, blocked, options),
        logits_extra_bytes=extra_peak_bytes(prepare, with_logits, options),
    )


def blocked(hidden: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """This project's."""
    return head_nll(hidden, embedding, targets, embedding.shape[0])


def with_logits(hidden: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """All logits, then torch's cross-entropy."""
    return F.cross_entropy(F.linear(hidden, embedding), targets, reduction="sum")


def prepare(loss: Loss, options: Options) -> Callable[[], object]:
    """Inputs and the call: loss and gradients."""
    hidden, embedding, targets = _inputs(options)
    return lambda: torch.autograd.grad(loss(hidden, embedding, targets), (hidden, embedding))


def render(result: HeadResult) -> list[str]:
    """Lines for a terminal."""
    options = result.options
    ratio = "n/a" if result.memory_ratio is None else f"{result.memory_ratio:.3f}"
    memory = [None if b is None else round(b / 1e6) for b in (result.extra_bytes, result.logits_extra_bytes)]
    return [
        f"loss of the head, forward + backward, T {options.tokens:,}, d {options.width}, V {options.vocabulary:,}, float32",
        str(result.machine),
        "error to float64 (with logits)   "
        + "  ".join(
            f"{name} {ours:.1e} ({theirs:.1e})"
            for name, ours, theirs in zip(("loss", "dh", "dE"), result.errors, result.logits_errors, strict=True)
        ),
        f"extra peak memory {memory[0]} MB against {memory[1]} MB with logits, {ratio} of it",
        f"{result.seconds:.2f} s, {result.speedup:.2f} times as fast as with logits",
    ]


def _inputs(options: Options, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(options.tokens, options.width, generator=generator).to(dtype).requires_grad_()
    embedding = (0.02 * torch.randn(options.vocabulary, options.width, generator=generator)).to(dtype).requires_grad_()
    return hidden, embedding, torch.randint(options.vocabulary, (options.tokens,), generator=generator)


def _errors(loss: Loss, options: Options) -> tuple[float, ...]:
    small = Options(min(options.tokens, 256), options.width, options.vocabulary)
    found = []
    for function, dtype in ((loss, torch.float32), (with_logits, torch.float64)):
        hidden, embedding, targets = _inputs(small, dtype)
        value = function(hidden, embedding, targets)
        found.append([value.detach(), *torch.autograd.grad(value, (hidden, embedding))])
    return tuple(float((got.double() - right).norm() / right.norm()) for got, right in zip(*found, strict=True))

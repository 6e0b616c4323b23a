"""AdamW with float32 master weights, and the learning rate of each step.

    lr(s) = peak * s / w                                                        for s = 1..w
    lr(s) = peak * (f + (1 - f) * (1 + cos(pi * (s - w) / (N - w))) / 2)        for s = w..N

with w warm-up steps, N steps in all, f the final fraction; s counts optimizer steps. Matrices decay; the embedding, norms,
biases and temperatures do not. The paper does not give its optimizer: these are this project's choices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from tangolm.config import ConfigError


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule.

    Args:
        peak_lr: learning rate at the end of the warm-up.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: of the matrices, per step and unit of learning rate.
        clip: largest norm of the whole gradient; larger ones are scaled down to it. None: no clipping.
        warmup: a whole number is steps, a fraction below 1 is that part of all steps.
        final_fraction: last learning rate over the peak.

    Raises:
        ValueError: a value out of range.
    """

    peak_lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float | None = 1.0
    warmup: int | float = 0.02
    final_fraction: float = 0.1

    def __post_init__(self) -> None:
        # One spelling of each value (1 and 1.0 would have different fingerprints).
        for name in ("peak_lr", "eps", "weight_decay", "final_fraction"):
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "betas", tuple(float(beta) for beta in self.betas))
        if self.clip is not None:
            object.__setattr__(self, "clip", float(self.clip))
        _require(0 < self.peak_lr < math.inf, "peak_lr", self.peak_lr, "above 0")
        _require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas), "betas", self.betas, "two of [0, 1)"
        )
        _require(0 < self.eps < math.inf, "eps", self.eps, "above 0")
        _require(0 <= self.weight_decay < math.inf, "weight_decay", self.weight_decay, "at least 0")
        _require(self.clip is None or 0 < self.clip < math.inf, "clip", self.clip, "above 0, or null for no clipping")
        whole = isinstance(self.warmup, int) and not isinstance(self.warmup, bool)
        _require(
            self.warmup >= 0 if whole else isinstance(self.warmup, float) and 0 <= self.warmup < 1,
            "warmup",
            self.warmup,
            "a whole number of steps, or a fraction of them in [0, 1)",
        )
        _require(0 <= self.final_fraction <= 1, "final_fraction", self.final_fraction, "in [0, 1]")


def warmup_steps(config: OptimizerConfig, steps: int) -> int:
    """How many of `steps` warm up.

    Raises:
        ConfigError: more warm-up steps than steps.
    """
    if isinstance(config.warmup, float):
        return max(1, round(config.warmup * steps)) if config.warmup else 0
    if config.warmup > steps:
        raise ConfigError(
            f"optimizer.warmup is {config.warmup} steps but the run has {steps}; give fewer, or a fraction"
        )
    return config.warmup


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The learning rate of optimizer step `step` (the first is 1) of `steps`."""
    warm = warmup_steps(config, steps)
    if step <= warm:
        return config.peak_lr * (step / warm)
    progress = (step - warm) / (steps - warm)
    wave = (1.0 + math.cos(math.pi * progress)) / 2.0
    return config.peak_lr * (config.final_fraction + (1.0 - config.final_fraction) * wave)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups, matrices with decay and the rest without; each has `names` beside `params`.

    Raises:
        ValueError: a parameter that is not float32. An update of relative size lr is lost in the 8 bits of a bfloat16
            number: norm weights near 1 and temperatures would never move.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed: list[tuple[str, nn.Parameter]] = []
    kept: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')}: AdamW needs float32 master weights; "
                "call model.float() and compute in bfloat16 with precision='bf16'"
            )
        (decayed if parameter.ndim >= 2 and id(parameter) not in embeddings else kept).append((name, parameter))
    grouped = [id(parameter) for _, parameter in decayed + kept]
    trained = [id(parameter) for parameter in model.parameters() if parameter.requires_grad]
    assert sorted(grouped) == sorted(trained), "every parameter belongs to exactly one group"
    return [
        {"params": [p for _, p in decayed], "names": [n for n, _ in decayed], "weight_decay": weight_decay},
        {"params": [p for _, p in kept], "names": [n for n, _ in kept], "weight_decay": 0.0},
    ]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the model's parameters; the trainer sets the learning rate before each step.

    Raises:
        ValueError: a parameter that is not float32.
    """
    groups = parameter_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.peak_lr, betas=config.betas, eps=config.eps)  # pyright: ignore[reportArgumentType]


def _require(holds: bool, name: str, value: object, what: str) -> None:
    if not holds:
        raise ValueError(f"{name} must be {what}, got {value!r}")

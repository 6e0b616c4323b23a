"""Tiny models, one of every preset family and implementation: a new architecture is under the contracts by being registered."""

from __future__ import annotations

import dataclasses

import torch

from tangolm.models import LanguageModel, ModelConfig, build_model, preset
from tangolm.models.presets import FAMILIES

VOCABULARY = 97
CONTEXT = 64


# Where depth 2 and width 48 would leave a part unused.
OTHERWISE: dict[str, dict[str, object]] = {
    "tango-3-sets": {"depth": 3},
    "gau": {"shared_width": 16},
    "flash": {"shared_width": 16, "group": 8},
    "windowed-tango": {"window": 8},
    "rotating-windowed-tango": {"window": 8},
    "specialist-windowed-tango": {"window": 8},
}


def tiny(family: str, **overrides: object) -> ModelConfig:
    """Depth 2, width 64, vocabulary 97."""
    config = preset(f"{family}-mini-d4", vocab_size=VOCABULARY, context=CONTEXT)
    return dataclasses.replace(config, **{"depth": 2, "gated_width": 48, **OTHERWISE.get(family, {}), **overrides})


def build(family: str, impl: str = "auto", seed: int = 0, **overrides: object) -> LanguageModel:
    return build_model(tiny(family, **overrides), seed=seed, impl=impl)


def livelier(model: LanguageModel) -> LanguageModel:
    """The same model with weights ten times as large, so that tokens interact strongly and a leak is seen."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(5)
    return model


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def assert_equal(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Equal relative to the largest absolute value."""
    assert got.shape == expected.shape
    scale = expected.abs().max().item() or 1.0
    error = (got - expected).abs().max().item() / scale
    assert error <= tolerance, f"differs by {error:.2e} of the largest value"


# A specialist is another width of an architecture that is here already.
EVERY = sorted(family for family in FAMILIES if not family.startswith("specialist"))
assert EVERY

"""`MODELS`, the one list of architectures, and building one from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tangolm.config import ConfigError, suggest
from tangolm.models.base import Block, LanguageModel, ModelConfig, initialize
from tangolm.models.compact import CompactTangoBlock, CompactTangoConfig
from tangolm.models.flash import FlashBlock, FlashConfig
from tangolm.models.gau import GauBlock, GauConfig
from tangolm.models.tango import TangoBlock, TangoConfig
from tangolm.models.transformer import TransformerBlock, TransformerConfig
from tangolm.models.windowed import WindowedTangoBlock, WindowedTangoConfig

MODELS: dict[str, tuple[type[ModelConfig], type[Block]]] = {
    "tango": (TangoConfig, TangoBlock),
    "windowed-tango": (WindowedTangoConfig, WindowedTangoBlock),
    "compact-tango": (CompactTangoConfig, CompactTangoBlock),
    "transformer": (TransformerConfig, TransformerBlock),
    "gau": (GauConfig, GauBlock),
    "flash": (FlashConfig, FlashBlock),
}


def build_model(config: ModelConfig, seed: int = 17, impl: str = "auto") -> LanguageModel:
    """A model with its initial weights, in float32 on the CPU.

    Args:
        config: of any architecture in `MODELS`; `preset` makes one.
        seed: of the initial weights.
        impl: which implementation computes the interaction of tokens; "auto" takes the fastest, `model.impl` tells which.

    Raises:
        ValueError: an implementation that this architecture or machine does not have.
    """
    model = LanguageModel(config, MODELS[config.architecture][1], impl)
    initialize(model, seed)
    return model


def config_class(data: Mapping[str, Any]) -> type[ModelConfig]:
    """The configuration class that `data["architecture"]` names; for `config.from_dict(..., resolve=...)`.

    Raises:
        ConfigError: no or an unknown architecture.
    """
    name = data.get("architecture")
    if not isinstance(name, str) or name not in MODELS:
        raise ConfigError(f"architecture {name!r} is not known{suggest(str(name), MODELS)}")
    return MODELS[name][0]

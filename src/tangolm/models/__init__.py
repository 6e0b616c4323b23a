"""The architectures: `MODELS` by name, `build_model`, presets, saving and loading.

An architecture is a file with its configuration and block, a line in `build.MODELS` and, for presets, a line in
`presets.FAMILIES`. Modules here are single-device and know nothing of data or training.
"""

from tangolm.models.base import Block, LanguageModel, ModelConfig, ModelOutput, Score, supervised
from tangolm.models.build import MODELS, build_model, config_class
from tangolm.models.cache import Cache
from tangolm.models.compact import CompactTangoBlock, CompactTangoConfig
from tangolm.models.files import load_model, read_model_config, read_tokenizer_name, save_model
from tangolm.models.flash import FlashBlock, FlashConfig
from tangolm.models.gau import GauBlock, GauConfig
from tangolm.models.layer import TangoLayer
from tangolm.models.memory import training_memory_bytes
from tangolm.models.presets import preset, preset_names, tier_of
from tangolm.models.tango import TangoBlock, TangoConfig
from tangolm.models.transformer import TransformerBlock, TransformerConfig
from tangolm.models.windowed import WindowedTangoBlock, WindowedTangoConfig

__all__ = [
    "MODELS",
    "Block",
    "Cache",
    "CompactTangoBlock",
    "CompactTangoConfig",
    "FlashBlock",
    "FlashConfig",
    "GauBlock",
    "GauConfig",
    "LanguageModel",
    "ModelConfig",
    "ModelOutput",
    "Score",
    "TangoBlock",
    "TangoConfig",
    "TangoLayer",
    "TransformerBlock",
    "TransformerConfig",
    "WindowedTangoBlock",
    "WindowedTangoConfig",
    "build_model",
    "config_class",
    "load_model",
    "preset",
    "preset_names",
    "read_model_config",
    "read_tokenizer_name",
    "save_model",
    "supervised",
    "tier_of",
    "training_memory_bytes",
]

"""A model in a folder: `model.safetensors` and `config.json`, free of pickle.

`config.json` is {"format": 1, "tokenizer": name, "model": {...}}. The tied head is the embedding, stored once.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from tangolm.config import ConfigError, from_dict, to_dict
from tangolm.models.base import LanguageModel, ModelConfig
from tangolm.models.build import build_model, config_class

FORMAT = 1
WEIGHTS = "model.safetensors"
CONFIG = "config.json"


def save_model(model: LanguageModel, folder: str | os.PathLike[str], tokenizer: str = "bytes") -> None:
    """Write the model into `folder`, made if missing: each file under a temporary name first, the configuration last."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_weights(model.config, tensors, folder, tokenizer)


def save_weights(
    config: ModelConfig, tensors: dict[str, Tensor], folder: str | os.PathLike[str], tokenizer: str
) -> None:
    """`save_model` of a model's state dict, contiguous and on the CPU."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / f"{WEIGHTS}.partial", metadata={"format": "pt"})
    os.replace(path / f"{WEIGHTS}.partial", path / WEIGHTS)
    record = {"format": FORMAT, "tokenizer": tokenizer, "model": to_dict(config)}
    (path / f"{CONFIG}.partial").write_text(json.dumps(record, indent=2) + "\n")
    os.replace(path / f"{CONFIG}.partial", path / CONFIG)


def load_model(folder: str | os.PathLike[str], impl: str = "auto") -> LanguageModel:
    """The model that `save_model` wrote, in the dtype it was saved in, on the CPU.

    Raises:
        ValueError: no model there, a damaged or foreign file, weights that do not fit the configuration.
    """
    path = Path(folder)
    model = build_model(read_model_config(path), impl=impl)
    try:
        tensors = load_file(path / WEIGHTS)
    except FileNotFoundError:
        raise ValueError(f"{path} has no {WEIGHTS}; give the folder of a saved model") from None
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{path / WEIGHTS} cannot be read ({error}); save the model again") from error
    expected = model.state_dict()
    for name in sorted(expected.keys() | tensors.keys()):
        if name not in tensors or name not in expected or tensors[name].shape != expected[name].shape:
            raise ValueError(f"{path / WEIGHTS} does not fit its {CONFIG} at tensor {name!r}; save the model again")
    model.load_state_dict(tensors, assign=True)
    return model


def read_model_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """The configuration of the model in `folder`.

    Raises:
        ValueError: no model there, or a damaged configuration.
    """
    return from_dict(ModelConfig, _record(Path(folder))["model"], resolve={ModelConfig: config_class}, where="model")


def read_tokenizer_name(folder: str | os.PathLike[str]) -> str:
    """The tokenizer that the model in `folder` was trained with.

    Raises:
        ValueError: no model there, or a damaged configuration.
    """
    return str(_record(Path(folder))["tokenizer"])


def _record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads((path / CONFIG).read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} holds no model ({CONFIG} is missing); give the folder of a saved model") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path / CONFIG} is damaged ({error}); save the model again") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT or not {"tokenizer", "model"} <= record.keys():
        raise ConfigError(f"{path / CONFIG} is not a tangolm model of format {FORMAT}")
    return record

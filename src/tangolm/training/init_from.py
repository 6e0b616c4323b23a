"""A run that begins with the weights of another one: continued pre-training or fine-tuning, with a fresh optimizer.

The weights come from a run's best checkpoint, a checkpoint, or a saved model. Their sha256 is part of the new run's identity;
the folder is not, and is not read any more once the new run has a checkpoint of its own.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tangolm.config import ConfigError, to_dict
from tangolm.models import LanguageModel, ModelConfig, load_model, read_model_config, read_tokenizer_name
from tangolm.models.files import WEIGHTS
from tangolm.training import checkpoint
from tangolm.training.durable import file_sha256
from tangolm.training.run import Run, RunConfig, differences, run_config


@dataclass(frozen=True)
class Origin:
    """A model in a folder: the sha256 of its weights, its configuration, the tokenizer it was trained with."""

    folder: Path
    sha256: str
    model: ModelConfig
    tokenizer: str


def find_origin(place: str | os.PathLike[str]) -> Origin:
    """The weights that `place` stands for: of a run, its best checkpoint; a checkpoint is verified.

    Raises:
        ValueError: no run, checkpoint or saved model; a run without an evaluated checkpoint; a damaged one.
    """
    folder = Path(place).resolve()
    if not folder.is_dir():
        raise ValueError(f"init_from {str(place)!r} is not a folder; give a run, a checkpoint or a saved model")
    if Run.exists(folder) and not (folder / WEIGHTS).exists():
        folder = Run(folder).best()
    if not (folder / WEIGHTS).exists():
        raise ValueError(f"init_from {str(place)!r} holds no {WEIGHTS}; give a run, a checkpoint or a saved model")
    if (folder / checkpoint.TRAINER).exists():
        checkpoint.verify(folder)
    return Origin(folder, file_sha256(folder / WEIGHTS), read_model_config(folder), read_tokenizer_name(folder))


def run_config_from(
    place: str | os.PathLike[str],
    data: str | os.PathLike[str],
    overrides: Iterable[str] = (),
    *,
    preset_name: str | None = None,
    **fields: Any,
) -> RunConfig:
    """The configuration of a run on a prepared folder that begins with the weights in `place`.

    Args:
        place: a run (its best checkpoint), a checkpoint, or a saved model.
        data, overrides, fields: as `run_config`.
        preset_name: None takes the architecture from the weights, with the context of the data.

    Raises:
        ValueError: as `run_config` and `find_origin`; weights of another model or tokenizer, by field.
    """
    origin = find_origin(place)
    begun = {"init_from": str(origin.folder), "init_sha256": origin.sha256}
    config = run_config(preset_name or origin.model, data, overrides, **fields, **begun)
    _check(config, origin)
    return config


def load_initial(config: RunConfig, model: LanguageModel, out: str | os.PathLike[str] | None = None) -> None:
    """Give `model` the weights that the run begins with, if it begins with any.

    Args:
        config: of the run.
        model: with the weights that `model_seed` drew.
        out: the run's folder; a run that has a checkpoint needs nothing else.

    Raises:
        ValueError: as `find_origin`; other weights than the run was configured for, or ones that do not fit, by name.
    """
    if config.init_from is None or (out is not None and checkpoint.checkpoints(Path(out) / "checkpoints")):
        return
    origin = find_origin(config.init_from)
    if origin.sha256 != config.init_sha256:
        raise ConfigError(
            f"init_from {config.init_from}: the weights hash to {origin.sha256[:12]}.., init_sha256 is "
            f"{str(config.init_sha256)[:12]}..; they are others than the run was configured for: start another run"
        )
    _check(config, origin)
    theirs, ours = load_model(origin.folder, impl=model.impl).state_dict(), model.state_dict()
    for name in sorted(ours.keys() | theirs.keys()):
        shapes = [list(tensors[name].shape) if name in tensors else None for tensors in (ours, theirs)]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                f"model.context is {config.model.context}, but the weights in {origin.folder} are bound to a context of "
                f"{origin.model.context}: {name} is {shapes[0]} here and {shapes[1]} there; prepare data of their context"
            )
    # Copied, not adopted: see `checkpoint.restore`.
    model.load_state_dict(theirs)


def _check(config: RunConfig, origin: Origin) -> None:
    """Refuse weights of another model or tokenizer. Contexts may differ: whether they may, the tensors' shapes decide."""
    ours = dataclasses.replace(config.model, context=origin.model.context)
    differing = differences(to_dict(ours), to_dict(origin.model), "model.")
    if config.tokenizer != origin.tokenizer:
        differing.append(f"tokenizer is {config.tokenizer!r} here and {origin.tokenizer!r} there")
    if differing:
        raise ConfigError(
            f"init_from {origin.folder} has another model: {'; '.join(differing)}; configure the run alike (without "
            "--preset it takes the model from there), on data of the same tokenizer"
        )

"""A checkpoint: a folder `step-00000100` that is whole, or does not exist.

    model.safetensors, config.json    the model, as `models.save_model` writes it
    optimizer.safetensors             AdamW's moments and step counts, "{parameter}.{exp_avg|exp_avg_sq|step}"
    trainer.json                      the `State`, the sha256 of the other files, and a seal over itself

It is written under a temporary name, flushed to the disk and renamed; a removed one is renamed first. Nothing in training is
random, so that step, samples, weights and moments are the whole state. No pickle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file

from tangolm.config import ConfigError, from_dict
from tangolm.models import LanguageModel, ModelConfig, load_model
from tangolm.models.files import save_weights
from tangolm.training.distributed import ALONE, World, like, whole
from tangolm.training.durable import file_sha256, seal_holds, sealed, sync_file, sync_folder

FORMAT = 1
OPTIMIZER = "optimizer.safetensors"
TRAINER = "trainer.json"
TEMPORARY = ".unfinished-"
NAME = re.compile(r"step-\d{8,}")


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, or one that is damaged, unfinished or foreign."""


@dataclass(frozen=True, kw_only=True)
class State:
    """Where a run stands.

    Args:
        step: optimizer steps done.
        samples: sequences consumed: the loader's whole state.
        tokens: supervised tokens trained on.
        best_step, best_nll: of the lowest development NLL so far; None before the first evaluation.
        run_id: of the configuration.
        run: the configuration itself as JSON data, to name what differs from another.
    """

    step: int
    samples: int
    tokens: int
    best_step: int | None
    best_nll: float | None
    run_id: str
    run: dict[str, Any]


def folder_name(step: int) -> str:
    """Name of the checkpoint of a step."""
    return f"step-{step:08d}"


def checkpoints(root: Path) -> list[Path]:
    """The checkpoint folders in `root`, oldest first; anything of another name is none."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if NAME.fullmatch(path.name) and path.is_dir()), key=step_of)


def step_of(folder: Path) -> int:
    """The step that a checkpoint's name says."""
    return int(folder.name.removeprefix("step-"))


def newest(root: Path) -> Path | None:
    """The newest checkpoint whose `trainer.json` is sound; None without any. The other files are not hashed."""
    for folder in reversed(checkpoints(root)):
        try:
            read_state(folder)
        except CheckpointError:
            continue
        return folder
    return None


def save(
    root: Path,
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    state: State,
    tokenizer: str,
    world: World = ALONE,
) -> Path:
    """Write the checkpoint of `state.step` into `root`; return its folder. All processes call, the first one writes.

    Raises:
        CheckpointError: the disk refused; nothing that looks like a checkpoint is left of it.
    """
    weights, moments = _gathered(model.state_dict(), world), _gathered(_optimizer_tensors(model, optimizer), world)
    return world.on_first(lambda: _write(root, model.config, weights, moments, state, tokenizer))


def _write(
    root: Path,
    config: ModelConfig,
    weights: dict[str, torch.Tensor],
    moments: dict[str, torch.Tensor],
    state: State,
    tokenizer: str,
) -> Path:
    final = root / folder_name(state.step)
    temporary = root / f"{TEMPORARY}{final.name}-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        save_weights(config, weights, temporary, tokenizer)
        save_file(moments, temporary / OPTIMIZER)
        files = sorted(path for path in temporary.iterdir())
        body = {
            "format": FORMAT,
            "state": dataclasses.asdict(state),
            "sha256": {path.name: file_sha256(path) for path in files},
        }
        (temporary / TRAINER).write_text(sealed(body), encoding="utf-8")
        for path in [*files, temporary / TRAINER]:
            sync_file(path)
        sync_folder(temporary)
        if final.exists():  # a damaged one that resuming passed over
            discard(final)
        os.rename(temporary, final)
        sync_folder(root)
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {final} could not be written: {error}; free the disk and go on with --resume "
            f"from {(newest(root) or Path('the beginning')).name}"
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def read_state(folder: Path) -> State:
    """The state in a checkpoint's sealed `trainer.json`.

    Raises:
        CheckpointError: missing, damaged, or of another format.
    """
    return _state(_read_trainer(folder), folder)


def verify(folder: Path) -> State:
    """`read_state` after hashing every file.

    Raises:
        CheckpointError: naming the file that is missing, damaged or does not belong there.
    """
    body = _read_trainer(folder)
    recorded: dict[str, str] = body["sha256"]
    present = {path.name for path in folder.iterdir()} - {TRAINER}
    for name in sorted(recorded.keys() | present):
        if name not in present:
            raise CheckpointError(f"checkpoint {folder} is not whole: {name} is missing; resume from another one")
        if name not in recorded:
            raise CheckpointError(f"checkpoint {folder} holds a file of somebody else: {name}; take it away")
        try:
            sound = file_sha256(folder / name) == recorded[name]
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {folder} is damaged: {name} cannot be read ({error.strerror}); resume from another one"
            ) from error
        if not sound:
            raise CheckpointError(
                f"checkpoint {folder} is damaged: {name} does not match its sha256; resume from another one"
            )
    return _state(body, folder)


def restore(folder: Path, model: LanguageModel, optimizer: torch.optim.Optimizer, checked: bool = False) -> State:
    """Copy a checkpoint's weights and moments into `model` and `optimizer`, every file hashed unless it has just been `checked`.

    Raises:
        CheckpointError: a damaged checkpoint, or one of another model.
    """
    state = read_state(folder) if checked else verify(folder)
    try:
        # Copied, not adopted: the memory of a loaded file is aligned differently, and products may then round differently.
        weights = load_model(folder, impl=model.impl).state_dict()
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tensor.copy_(like(weights[name], tensor))
        tensors = load_file(folder / OPTIMIZER)
    except (RuntimeError, safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"checkpoint {folder} does not fit this run: {error}") from error
    parameters, names = dict(model.named_parameters()), _names(model, optimizer)
    loaded = optimizer.state_dict()
    loaded["state"] = {}
    for index, name in enumerate(names):
        prefix = f"{name}."
        own = {
            key.removeprefix(prefix): like(tensor, parameters[name]) if tensor.ndim else tensor
            for key, tensor in tensors.items()
            if key.startswith(prefix)
        }
        if own:
            loaded["state"][index] = own
    if state.step and len(loaded["state"]) != len(names):
        raise CheckpointError(f"checkpoint {folder}: {OPTIMIZER} lacks the moments of some parameters")
    optimizer.load_state_dict(loaded)
    return state


def rotate(root: Path, keep: Collection[int | None], ours: Callable[[dict[str, Any]], bool]) -> None:
    """Remove the checkpoints in `root` but those of the steps to keep.

    Args:
        root: the folder of the checkpoints.
        keep: steps.
        ours: whether a configuration (as JSON data) is that of the run. A checkpoint of another one stays, and so does one
            whose `trainer.json` is damaged, because nothing says whose it is.
    """
    for folder in checkpoints(root):
        if step_of(folder) in keep:
            continue
        with contextlib.suppress(CheckpointError):
            if ours(read_state(folder).run):
                discard(folder)


def discard(folder: Path) -> None:
    """Remove a checkpoint; interrupted, it leaves nothing that looks like one."""
    doomed = folder.with_name(f"{TEMPORARY}removed-{folder.name}-{os.getpid()}")
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def clean(root: Path) -> None:
    """Remove what interrupted saves and removals have left. Only for the one process that trains this run."""
    for leftover in root.glob(f"{TEMPORARY}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _names(model: LanguageModel, optimizer: torch.optim.Optimizer) -> list[str]:
    """The parameters' names in the optimizer's order."""
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return [by_id[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _optimizer_tensors(model: LanguageModel, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    names = _names(model, optimizer)
    tensors = {}
    for index, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            tensors[f"{names[index]}.{key}"] = torch.as_tensor(value)
    return tensors


def _gathered(tensors: dict[str, torch.Tensor], world: World) -> dict[str, torch.Tensor]:
    """Whole tensors on the CPU, in the first process; one at a time passes through the others."""
    gathered = {}
    for name, tensor in tensors.items():
        full = whole(tensor)
        if world.first:
            gathered[name] = full
    return gathered


def _read_trainer(folder: Path) -> dict[str, Any]:
    try:
        text = (folder / TRAINER).read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise CheckpointError(
            f"checkpoint {folder} is not whole: {TRAINER} is missing; resume from another one"
        ) from None
    except (OSError, UnicodeDecodeError):
        text = ""
    if not seal_holds(text):
        raise CheckpointError(
            f"checkpoint {folder} is damaged: {TRAINER} does not match its seal; resume from another one"
        )
    body = json.loads(text)
    del body["seal"]
    if body.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint {folder} has format {body.get('format')!r}, this version reads {FORMAT}")
    return body


def _state(body: dict[str, Any], folder: Path) -> State:
    data = body["state"]
    try:
        run = data["run"]
        state = from_dict(State, {**data, "run": {}})
    except (ConfigError, KeyError) as error:
        raise CheckpointError(f"checkpoint {folder}: {TRAINER} is not a trainer's state ({error})") from error
    if folder.name != folder_name(state.step):
        raise CheckpointError(
            f"checkpoint {folder} is of step {state.step}; its folder must be named {folder_name(state.step)}"
        )
    return dataclasses.replace(state, run=run)

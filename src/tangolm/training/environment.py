"""Where a run computes: device and precision, chosen or refused, and the record of both in `environment.json`."""

from __future__ import annotations

import contextlib
import platform
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy
import safetensors
import torch

import tangolm
from tangolm.config import ConfigError
from tangolm.training.distributed import ALONE, World
from tangolm.training.run import RunConfig


@dataclass(frozen=True)
class Place:
    """A device and how the forward passes round on it."""

    device: torch.device
    precision: Literal["float32", "bf16"]

    def autocast(self) -> AbstractContextManager[Any]:
        """Context of a forward pass: bf16 autocast over float32 weights, or nothing."""
        if self.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def synchronise(self) -> None:
        """Wait for the device, so that a clock may be read."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    @property
    def name(self) -> str:
        """The device in words."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return platform.processor() or platform.machine()


def choose(config: RunConfig, world: World = ALONE) -> Place:
    """The device and precision that a run takes here; of several accelerators each process of a machine takes its own.

    Raises:
        ConfigError: a device or precision that this machine does not have.
    """
    usable: dict[str, Callable[[], bool]] = {
        "cuda": torch.cuda.is_available,
        "mps": torch.backends.mps.is_available,
        "cpu": lambda: True,
    }
    name = config.device
    if name == "auto":
        name = next(kind for kind, here in usable.items() if here())
    elif not usable[name]():
        raise ConfigError(f"device {name!r} is not available here; device='auto' takes one that is")
    bf16 = name == "cpu" or (name == "cuda" and torch.cuda.is_bf16_supported())
    precision = config.precision
    if precision == "auto":
        precision = "bf16" if bf16 and name != "cpu" else "float32"
    elif precision == "bf16" and not bf16:
        raise ConfigError(f"precision 'bf16' is not available on {name} here; precision='auto' takes one that is")
    if name == "cuda" and world.size > 1:
        if world.local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"process {world.rank} is number {world.local_rank} on its machine, which has {torch.cuda.device_count()} "
                "GPUs; give torchrun --nproc-per-node that number at most"
            )
        return Place(torch.device(name, world.local_rank), precision)
    return Place(torch.device(name), precision)


def describe(place: Place, impl: str, step: int, world: World, parallel: str) -> dict[str, Any]:
    """The record of a start at `step`: versions, device, processes, what "auto" became, git revision of this package."""
    return {
        "tangolm": tangolm.__version__,
        "git_revision": git_revision(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "safetensors": metadata.version(safetensors.__name__),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": place.device.type,
        "device_name": place.name,
        "precision": place.precision,
        "impl": impl,
        "threads": torch.get_num_threads(),
        "processes": world.size,
        "parallel": parallel if world.size > 1 else None,
        "step": step,
    }


def git_revision() -> str | None:
    """Commit of the checkout that this package runs from, "-dirty" behind it if changed; None outside one."""
    source = Path(__file__).resolve()

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(source.parent), *arguments], capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    # An environment inside somebody else's checkout is not that checkout's code.
    if git("ls-files", "--error-unmatch", source.name) is None:
        return None
    revision = git("rev-parse", "HEAD")
    if revision is None:
        return None
    return revision + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")

"""Several processes as one run: who this one is, what all of them do together, and the model that they train together.

`torchrun` starts the processes and says in the environment how many they are. Every process holds the same batches, decides
the same and reads the same files; only the first one writes and talks. Two ways to hold the model:

ddp     each process has all of it, and gradients are averaged (`DistributedDataParallel`)
fsdp    each process keeps its share of weights, gradients and moments; the weights are gathered to compute (`fully_shard`):
        those of an untied block while it computes, those of a looped block for the whole pass
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tangolm.config import ConfigError
from tangolm.models import LanguageModel

T = TypeVar("T")
PATIENCE = timedelta(minutes=30)  # of one process for the others: the first one may be writing a large checkpoint


class ElsewhereError(ValueError):
    """What another process has met, which tells of it."""


class LostProcessError(ValueError):
    """Another process has ended in the middle of something that needs all."""


@dataclass(frozen=True)
class World:
    """The processes of a run, and which one this is.

    Args:
        rank: of this process, from 0.
        size: how many there are.
        local_rank: of this process on its machine.
        local_size: how many there are on it.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes and talks."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Which of `count` things in order are this process's; the shares differ by one at most."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def largest_share(self, count: int) -> int:
        """How many things the process with most has."""
        return -(-count // self.size)

    def micro_batch(self, batch_size: int, micro_batch: int | None) -> int:
        """Sequences of one pass of a process: what is asked for, or all that it has of a batch."""
        share = self.largest_share(batch_size)
        return share if micro_batch is None else min(micro_batch, share)

    def passes(self, batch_size: int, micro_batch: int | None) -> int:
        """Forward and backward passes that every process makes of a batch."""
        return -(-self.largest_share(batch_size) // self.micro_batch(batch_size, micro_batch))

    def sum(self, values: Tensor) -> Tensor:
        """`values` (on the CPU) added up over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def agree(self, action: Callable[[], T]) -> T:
        """What `action` gives, which every process does; where it fails in any, all end.

        Raises:
            Exception: in the lowest process where it failed, what it raised.
            ElsewhereError: in all others.
        """
        if self.size == 1:
            return action()
        result, failure = None, None
        try:
            result = action()
        except Exception as error:  # told to the others, then raised again
            failure = error
        told: list[str | None] = [None] * self.size
        dist.all_gather_object(told, None if failure is None else f"{type(failure).__name__}: {failure}")
        failed = next((rank for rank, message in enumerate(told) if message is not None), None)
        if failed is None:
            return result  # pyright: ignore[reportReturnType]
        if failed == self.rank and failure is not None:
            raise failure
        raise ElsewhereError(f"process {failed}: {told[failed]}") from failure

    def on_first(self, action: Callable[[], T]) -> T:
        """What `action` gives in the first process, which alone does it; its failure ends all. JSON data or paths."""
        result = self.agree(lambda: action() if self.first else None)
        if self.size > 1:
            box = [result]
            dist.broadcast_object_list(box, src=0)
            result = box[0]
        return result  # pyright: ignore[reportReturnType]


ALONE = World()


@contextlib.contextmanager
def joined() -> Iterator[World]:
    """The processes that `torchrun` has started, connected; this process alone without it. Inside another: the same ones.

    Raises:
        ValueError: a torch without `torch.distributed`.
        LostProcessError: another process ended while this one waited for it.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    if not dist.is_available():
        raise ValueError(f"WORLD_SIZE is {size}, but this torch has no torch.distributed; start without torchrun")
    local_rank, local_size = (
        int(os.environ.get(f"LOCAL_{name}", value)) for name, value in (("RANK", 0), ("WORLD_SIZE", 1))
    )
    world = World(int(os.environ["RANK"]), size, local_rank, local_size)
    if dist.is_initialized():
        yield world
        return
    accelerated = torch.cuda.is_available() and dist.is_nccl_available()
    if accelerated:
        torch.cuda.set_device(world.local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if accelerated else "gloo", timeout=PATIENCE)
    try:
        yield world
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise LostProcessError(
                f"process {world.rank} of {size} has lost another one, which has ended or cannot be reached ({error}); "
                "go on with --resume"
            ) from error
        raise
    dist.destroy_process_group()  # not behind an error: it would wait for processes that are gone


class Parallel:
    """A model as the processes of a world train it; `passes` is called for forward passes, `model` is the model itself."""

    def __init__(
        self,
        model: LanguageModel,
        world: World = ALONE,
        kind: Literal["ddp", "fsdp"] = "ddp",
        device: torch.device | None = None,
        compiled: bool = False,
    ) -> None:
        """
        Args:
            model: the same weights in every process.
            world: the processes.
            kind: how they hold it; one process holds it as it is.
            device: where the model is; with "fsdp" where its shares go.
            compiled: whether passes are compiled.
        """
        self.model, self.world = model, world
        self._kind = kind if world.size > 1 else None
        if self._kind == "fsdp":
            _shard(model, world, device or torch.device("cpu"))
        self.passes: Any = torch.compile(model) if compiled else model
        if self._kind == "ddp":
            self.passes = nn.parallel.DistributedDataParallel(self.passes, gradient_as_bucket_view=True)

    def exchanging(self, last: bool) -> AbstractContextManager[Any]:
        """Around a forward and backward pass of a step: gradients are exchanged behind the last one only."""
        if self._kind == "ddp" and not last:
            return self.passes.no_sync()
        if self._kind == "fsdp":
            self.model.set_requires_gradient_sync(last)  # pyright: ignore[reportCallIssue]
        return contextlib.nullcontext()


def check_parallel(kind: str, world: World, device: torch.device, batch_size: int) -> None:
    """
    Raises:
        ConfigError: sharding over one process, a device that does not know it, or fewer sequences than processes.
    """
    if batch_size < world.size:
        raise ConfigError(
            f"batch_size {batch_size} (sequences of all processes together) is below the {world.size} processes; "
            f"give at least {world.size}, or start fewer processes"
        )
    if kind != "fsdp":
        return
    if world.size == 1:
        raise ConfigError(
            "parallel 'fsdp' shards a model over several processes and there is one: start it with "
            "torchrun --nproc-per-node N -m tangolm train, or set parallel=ddp"
        )
    if device.type == "mps":
        raise ConfigError("parallel 'fsdp' does not run on mps; device=cpu or cuda has it")


def _shard(model: LanguageModel, world: World, device: torch.device) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (world.size,))
    if not model.config.looped:  # a looped block is called N times a pass: gathered once, with the rest of the model
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "score")


def whole(tensor: Tensor) -> Tensor:
    """A tensor on the CPU, gathered where it is sharded (then every process must call)."""
    full: Tensor = tensor.full_tensor() if _sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]
    return full.detach().cpu().contiguous()


def local(tensor: Tensor) -> Tensor:
    """This process's share of a tensor: all of it where it is not sharded."""
    return tensor.to_local() if _sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def like(values: Tensor, tensor: Tensor) -> Tensor:
    """Whole `values`, which every process has, laid out as `tensor` is."""
    if not _sharded(tensor):
        return values
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = tensor.device_mesh, tensor.placements  # pyright: ignore[reportAttributeAccessIssue]
    return distribute_tensor(values.to(tensor.device), mesh, placements, src_data_rank=None)


def _sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor; importing that class takes a second, and one process has none."""
    return hasattr(tensor, "full_tensor")

"""Whether a run fits its device's memory, said before it takes any.

The estimate (`models.training_memory_bytes`, of one micro-batch) is what a step holds for certain: weights, gradients, moments
and what autograd keeps. Passing tensors, the allocator and the interpreter come on top: real steps on a CPU took 1.4 to 2.6
times as much at the mini tier and 1.08 to 1.13 times at 70M, never less. Hence a run is refused only where the estimate alone is
above ALL the memory there is (swap and control groups counted), which neither other programs nor an error of the estimate
explain; where it is above what is available now, the run begins with a warning.
"""

from __future__ import annotations

import dataclasses

from tangolm.config import ConfigError
from tangolm.models import training_memory_bytes
from tangolm.models.memory import BYTES_PER_PARAMETER
from tangolm.training.distributed import ALONE, World
from tangolm.training.environment import Place
from tangolm.training.memory import Memory, device_memory
from tangolm.training.run import RunConfig


def estimated_bytes(config: RunConfig, place: Place, world: World = ALONE, micro_batch: int | None = None) -> int:
    """The estimate for a micro-batch of one process of the run, or for one of so many sequences."""
    batch = micro_batch or world.micro_batch(config.batch_size, config.micro_batch)
    estimate = training_memory_bytes(config.model, batch, place.precision, config.impl, config.recompute)
    if config.parallel == "fsdp":  # of weights, gradients and moments each process keeps its share
        estimate -= BYTES_PER_PARAMETER * config.model.parameters()["total"] * (world.size - 1) // world.size
    return estimate


def check_fits(config: RunConfig, place: Place, world: World = ALONE) -> str | None:
    """A warning where the run may be too large for the memory that is available; None where it seems to fit or nothing is known.

    Raises:
        ConfigError: it cannot fit; the message names the largest micro_batch that does.
    """
    memory = device_memory(place.device)
    if memory is None:
        return None
    if place.device.type == "cpu":  # which the processes of a machine share
        memory = Memory(memory.total // world.local_size, memory.available // world.local_size)
    micro_batch = world.micro_batch(config.batch_size, config.micro_batch)
    if _surely_below(config, micro_batch) <= memory.available:
        return None
    needed = estimated_bytes(config, place, world)
    if needed <= memory.available:
        return None
    what = (
        f"micro_batch {micro_batch} needs at least {_gib(needed)} on {place.device.type}, which has {_gib(memory.total)} "
        f"({_gib(memory.available)} available): {_remedy(config, place, world, memory)}"
    )
    if needed > memory.total:
        raise ConfigError(what)
    return what


def largest(config: RunConfig, place: Place, limit: int, world: World = ALONE) -> int:
    """The largest micro_batch whose estimate is within `limit` bytes; 0 where not even one sequence is."""
    fits, fails = 0, world.micro_batch(config.batch_size, config.micro_batch) + 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if estimated_bytes(config, place, world, middle) <= limit:
            fits = middle
        else:
            fails = middle
    return fits


def _remedy(config: RunConfig, place: Place, world: World, memory: Memory) -> str:
    fits = largest(config, place, memory.available, world)
    if fits:
        return f"by the estimate the largest that fits is micro_batch={fits}"
    if not config.recompute:
        fits = largest(dataclasses.replace(config, recompute=True), place, memory.available, world)
        if fits:
            return f"not even micro_batch=1 fits; with recompute=true the largest that fits is micro_batch={fits}"
    return "not even micro_batch=1 fits, with recompute=true neither; take a smaller model or a shorter context"


def _surely_below(config: RunConfig, batch: int) -> int:
    """More than the estimate of any architecture can be, without tracing: most runs are far from any limit."""
    model = config.model
    rows = batch * model.context
    wide = 32 * model.width + 16 * model.gated_width + model.vocab_size
    pairs = batch * model.width * model.context**2  # at most a matrix of all pairs a channel
    weights = (16 + 8 * model.depth) * model.parameters()["total"]  # an application may keep its weights rounded or cut
    return weights + 4 * model.depth * (rows * wide + pairs)


def _gib(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB"

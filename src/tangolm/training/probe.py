"""One optimizer step of a run, measured in a process of its own, before anything is spent on the run.

    seconds of a step = median(update of one micro-batch) + (batch_size / micro_batch - 1) * median(a further pass)
    seconds of a run  = steps * (a step + reading its batch) + evaluations * rows * (an evaluation batch / its rows)

All micro-batches of a run have the same shape, so that one stands for all, and they are real rows of the training split. A few
updates warm up: the first one allocates the moments, and memory settles behind some more. The peak is that of the whole process,
as a run records it: the update holds weights, moments, gradients and activations together, and an evaluation batch is passed
too. Not in it: starting, hashing the data, and writing checkpoints.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tangolm.config import to_dict
from tangolm.data import mixture
from tangolm.data.loader import Loader
from tangolm.data.mixture import MixedSplit
from tangolm.data.shards import Split
from tangolm.evaluation.nll import evaluate
from tangolm.models import build_model
from tangolm.training import environment
from tangolm.training.distributed import Parallel
from tangolm.training.memory import peak_memory_bytes
from tangolm.training.metrics import WARMUP_UPDATES
from tangolm.training.optim import build_optimizer, learning_rate
from tangolm.training.run import RunConfig, config_from_dict
from tangolm.training.trainer import EVALUATION_BATCH
from tangolm.training.update import accumulate, update

ROUNDS, MOST_ROUNDS = 3, 20  # timed updates: more than ROUNDS only while they are short
ENOUGH_SECONDS = 6.0
WARM_SECONDS = 10.0  # a step that takes long needs but one
CHILD = "from tangolm.training.probe import main; main()"


def probe(config: RunConfig) -> dict[str, Any]:
    """Measure a step of the run in a child process with as many threads as this one.

    Returns:
        JSON data: seconds_per_step, seconds_per_batch (reading it), seconds_per_row (evaluating it), peak_memory_bytes (None
        where the device does not say), rounds.

    Raises:
        ValueError: the child did not get through, as for want of memory.
    """
    request = json.dumps({"config": to_dict(config), "threads": torch.get_num_threads()})
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=request,
        capture_output=True,
        text=True,
        env=child_environment(),
    )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        what = f"was ended by signal {-done.returncode}" if done.returncode < 0 else f"failed: {said}"
        raise ValueError(
            f"the probe of one step with micro_batch {config.micro_batch or config.batch_size} {what}; where memory was "
            "short, a smaller micro_batch or recompute=true takes less"
        )
    return json.loads(done.stdout.splitlines()[-1])


def child_environment() -> dict[str, str]:
    """Variables for another Python, which then imports this very package."""
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def main() -> None:
    """The child: a request on standard input, the measurement on standard output."""
    request = json.loads(sys.stdin.read())
    torch.set_num_threads(request["threads"])
    print(json.dumps(measure(config_from_dict(request["config"])), allow_nan=False))


def measure(config: RunConfig) -> dict[str, Any]:
    """What `probe` returns, measured here and now: the peak is this process's."""
    place = environment.choose(config)
    train, dev = (mixture.open_data(Path(config.data), split) for split in ("train", "dev"))
    model = build_model(config.model, config.model_seed, config.impl).to(place.device)
    optimizer = build_optimizer(model, config.optimizer)
    model.recompute(config.recompute)
    parallel = Parallel(model, compiled=config.compile)
    micro_batch = config.micro_batch or config.batch_size
    loader = Loader(train, config.batch_size, config.data_seed)
    batch = loader.batch(0, micro_batch)
    lr = learning_rate(config.optimizer, 1, config.budget(train.rows).steps)

    def step() -> None:
        update(
            parallel,
            optimizer,
            batch,
            lr=lr,
            clip=config.optimizer.clip,
            micro_batch=micro_batch,
            place=place,
        )

    def further() -> None:
        accumulate(parallel, batch, micro_batch=micro_batch, place=place)

    def seconds(call: Callable[[], object]) -> float:
        place.synchronise()
        started = time.perf_counter()
        call()
        place.synchronise()
        return time.perf_counter() - started

    if getattr(config.model, "segments", 1) > 1:
        model.rotate(1)
    more = config.batch_size / micro_batch - 1
    started = time.perf_counter()
    for done in range(WARMUP_UPDATES):
        if done and time.perf_counter() - started > WARM_SECONDS:
            break
        step()
        if more:
            further()  # on top of the gradients: what it holds beside them is part of the peak
    updates: list[float] = []
    passing: list[float] = []
    started = time.perf_counter()
    while len(updates) < ROUNDS or (len(updates) < MOST_ROUNDS and time.perf_counter() - started < ENOUGH_SECONDS):
        updates.append(seconds(step))
        if more:
            passing.append(seconds(further))
    reading = [seconds(lambda at=at: loader.batch(at * config.batch_size)) for at in range(1, 1 + ROUNDS)]
    limit = min(EVALUATION_BATCH, config.evaluation_rows or EVALUATION_BATCH)
    with place.autocast():
        evaluating = [
            seconds(lambda: evaluate(model, dev, EVALUATION_BATCH, limit, place.device)) for _ in range(1 + ROUNDS)
        ]
    return {
        "seconds_per_step": median(updates) + (more * median(passing) if more else 0.0),
        "seconds_per_batch": median(reading),
        "seconds_per_row": median(evaluating[1:]) / rows_evaluated(dev, limit),
        "peak_memory_bytes": peak_memory_bytes(place.device),
        "rounds": len(updates),
    }


def rows_evaluated(split: Split | MixedSplit, limit: int | None) -> int:
    """Rows that an evaluation with `limit_rows` reads."""
    parts = split.parts.values() if isinstance(split, MixedSplit) else [split]
    return sum(part.rows if limit is None else min(limit, part.rows) for part in parts)

"""What a run would be, before anything is spent on it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tangolm.data.mixture import MixedSplit
from tangolm.data.shards import Split
from tangolm.models import build_model
from tangolm.training import environment, logs
from tangolm.training import probe as step_probe
from tangolm.training.distributed import ALONE, World, check_parallel
from tangolm.training.fit import check_fits, estimated_bytes
from tangolm.training.init_from import load_initial
from tangolm.training.observe import Rates
from tangolm.training.optim import learning_rate, warmup_steps
from tangolm.training.run import RunConfig, open_data


def plan(
    config: RunConfig,
    out: str | os.PathLike[str] | None = None,
    *,
    probe: bool = False,
    note: Callable[[str], object] | None = None,
    world: World = ALONE,
) -> dict[str, Any]:
    """The dry run: everything is checked and the data hashed, nothing is written.

    Args:
        config: of the run.
        out: its folder, where there is one already: `load_initial` asks whether it has a checkpoint.
        probe: also measure one step in a process of its own, which takes seconds (a minute for the largest models).
        note: called with a line before what takes its time.
        world: the processes that would train; a probe measures the share of one, without what they exchange.

    Returns:
        JSON data: run_id; device, precision, impl (what "auto" becomes); parameters; macs_per_sequence and
        useful_macs_per_sequence (one forward pass); training_memory_bytes (an estimate for one micro-batch); steps, samples,
        tokens (all positions), epochs; batch_size, micro_batch, passes_per_step, processes; evaluate_every, checkpoint_every
        (steps); data (rows and supervised share of the training split, rows of the development split); schedule (warm-up steps,
        learning rate by step); warning (None, or that memory may be short); probe (None where not asked for): seconds_per_step,
        seconds_per_evaluation, evaluations, hours_total (steps, reading and evaluations, without checkpoints and the start),
        peak_memory_bytes (of the whole process on the CPU, of the tensors on CUDA, None elsewhere), tokens_per_s,
        operations_per_s, utilisation (`observe`), rounds (timed updates).

    Raises:
        ValueError: whatever `train` would refuse; a probe that does not get through.
    """
    place = environment.choose(config, world)
    check_parallel(config.parallel, world, place.device, config.batch_size)
    logs.require(config)
    warning = check_fits(config, place, world)
    train_split, dev_split = open_data(config, "train"), open_data(config, "dev")
    steps, samples = config.budget(train_split.rows)
    micro_batch = world.micro_batch(config.batch_size, config.micro_batch)
    model = build_model(config.model, config.model_seed, config.impl)
    load_initial(config, model, out)
    macs = config.model.macs()
    warmup = warmup_steps(config.optimizer, steps)
    marks = sorted({1, max(1, warmup), max(1, steps // 2), steps})
    if probe and note is not None:
        note(f"probing one step with micro_batch {micro_batch} in a process of its own ...")
    return {
        "run_id": config.run_id,
        "device": place.device.type,
        "device_name": place.name,
        "precision": place.precision,
        "impl": model.impl,
        "parameters": config.model.parameters(),
        "macs_per_sequence": macs["macs"],
        "useful_macs_per_sequence": macs["useful_macs"],
        "training_memory_bytes": estimated_bytes(config, place, world),
        "steps": steps,
        "samples": samples,
        "tokens": samples * config.model.context,
        "epochs": samples / train_split.rows,
        "batch_size": config.batch_size,
        "micro_batch": micro_batch,
        "passes_per_step": world.passes(config.batch_size, config.micro_batch),
        "processes": world.size,
        "evaluate_every": config.evaluation_steps(steps),
        "checkpoint_every": config.checkpoint_steps(steps),
        "data": {
            "folder": config.data,
            "train_rows": train_split.rows,
            "supervised_share": train_split.entry.supervised_tokens / train_split.entry.tokens,
            "dev_rows": min(dev_split.rows, config.evaluation_rows or dev_split.rows),
        },
        "schedule": {
            "warmup_steps": warmup,
            "lr": {str(step): learning_rate(config.optimizer, step, steps) for step in marks},
        },
        "warning": warning,
        "probe": _probed(config, place, steps, samples, dev_split, world) if probe else None,
    }


def _probed(
    config: RunConfig, place: environment.Place, steps: int, samples: int, dev: Split | MixedSplit, world: World
) -> dict[str, Any]:
    share = replace(
        config,
        batch_size=world.largest_share(config.batch_size),
        micro_batch=world.micro_batch(config.batch_size, config.micro_batch),
        parallel="ddp",
    )
    measured = step_probe.probe(share)
    step = measured["seconds_per_step"]
    every = config.evaluation_steps(steps)
    evaluations = -(-steps // every)
    evaluation = measured["seconds_per_row"] * step_probe.rows_evaluated(dev, config.evaluation_rows) / world.size
    # In sequences, because the last step of an epoch may be smaller.
    seconds = samples / config.batch_size * (step + measured["seconds_per_batch"]) + evaluations * evaluation
    return {
        "seconds_per_step": step,
        "seconds_per_evaluation": evaluation,
        "evaluations": evaluations,
        "hours_total": seconds / 3600,
        "peak_memory_bytes": measured["peak_memory_bytes"],
        "tokens_per_s": config.batch_size * config.model.context / step,
        **Rates(config, place, world).of(config.batch_size, step),
        "rounds": measured["rounds"],
    }

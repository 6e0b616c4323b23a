"""What a run would be, before anything is spent on it."""

from __future__ import annotations

import os
from typing import Any

from tangolm.models import build_model, training_memory_bytes
from tangolm.training import environment
from tangolm.training.init_from import load_initial
from tangolm.training.optim import learning_rate, warmup_steps
from tangolm.training.run import RunConfig, open_data


def plan(config: RunConfig, out: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The dry run: everything is checked and the data hashed, nothing is trained or written.

    Args:
        config: of the run.
        out: its folder, where there is one already: `load_initial` asks whether it has a checkpoint.

    Returns:
        JSON data: run_id; device, precision, impl (what "auto" becomes); parameters; macs_per_sequence and
        useful_macs_per_sequence (one forward pass); training_memory_bytes (an estimate for one micro-batch); steps, samples,
        tokens (all positions), epochs; batch_size, micro_batch, passes_per_step; evaluate_every, checkpoint_every (steps);
        data (rows and supervised share of the training split, rows of the development split); schedule (warm-up steps,
        learning rate by step).

    Raises:
        ValueError: whatever `train` would refuse.
    """
    place = environment.choose(config)
    train_split, dev_split = open_data(config, "train"), open_data(config, "dev")
    steps, samples = config.budget(train_split.rows)
    micro_batch = config.micro_batch or config.batch_size
    model = build_model(config.model, config.model_seed, config.impl)
    load_initial(config, model, out)
    macs = config.model.macs()
    warmup = warmup_steps(config.optimizer, steps)
    marks = sorted({1, max(1, warmup), max(1, steps // 2), steps})
    return {
        "run_id": config.run_id,
        "device": place.device.type,
        "device_name": place.name,
        "precision": place.precision,
        "impl": model.impl,
        "parameters": config.model.parameters(),
        "macs_per_sequence": macs["macs"],
        "useful_macs_per_sequence": macs["useful_macs"],
        "training_memory_bytes": training_memory_bytes(
            config.model, micro_batch, place.precision, config.impl, config.recompute
        ),
        "steps": steps,
        "samples": samples,
        "tokens": samples * config.model.context,
        "epochs": samples / train_split.rows,
        "batch_size": config.batch_size,
        "micro_batch": micro_batch,
        "passes_per_step": -(-config.batch_size // micro_batch),
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
    }

"""The dry run says what a run would be, and leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tangolm.config import ConfigError
from tangolm.training import Run, RunConfig, plan, train


def test_plan_is_what_then_happens(tiny: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = tiny(epochs=2, micro_batch=3)
    planned = plan(config)
    assert json.loads(json.dumps(planned)) == planned
    assert list(tmp_path.iterdir()) == []
    result = train(config, tmp_path / "run", progress=False)
    run = Run(result.folder)
    records = [record for record in run.metrics() if record["kind"] == "train"]
    assert planned["steps"] == result.steps == len(records)
    assert planned["samples"] == records[-1]["samples"]
    assert planned["tokens"] == sum(record["tokens"] for record in records)
    assert planned["epochs"] == 2.0
    assert planned["passes_per_step"] == 2
    assert planned["parameters"]["total"] == sum(p.numel() for p in run.load().parameters())
    assert planned["training_memory_bytes"] > 16 * planned["parameters"]["total"]
    assert planned["macs_per_sequence"] > planned["useful_macs_per_sequence"] > 0
    for step, rate in planned["schedule"]["lr"].items():
        assert records[int(step) - 1]["lr"] == rate
    evaluated = [record["step"] for record in run.metrics() if record["kind"] == "evaluation"]
    assert evaluated[0] == planned["evaluate_every"]
    environment = run.environment()
    assert environment is not None
    for key in ("device", "device_name", "precision", "impl"):
        assert environment[key] == planned[key]


def test_plan_refuses_what_training_would(tiny: Callable[..., RunConfig]) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.warmup is 20 steps but the run has 12"):
        plan(tiny("optimizer.warmup=20"))
    with pytest.raises(ValueError, match="impl 'fast'"):
        plan(tiny(impl="fast"))

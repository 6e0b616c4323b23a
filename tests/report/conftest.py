"""Hand-made run folders: every file that a run leaves, or some of them, with known figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tangolm
from tangolm.training import OptimizerConfig, Run, RunConfig

HOSTILE = "<script>alert('x')</script> & \"2\" < 3 [bold]not[/bold]"
SHA = "ab" * 32


def config(preset: str = "tango-mini-d4", **fields: Any) -> RunConfig:
    values: dict[str, Any] = {
        "model": tangolm.preset(preset),
        "data": "/nowhere/data",
        "data_sha256": SHA,
        "tokenizer": "bytes",
        "optimizer": OptimizerConfig(peak_lr=2e-3),
        "steps": 40,
        **fields,
    }
    return RunConfig(**values)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a run's folder: `steps` done of 40, all results or only some."""

    def make(
        name: str = "run",
        preset: str = "tango-mini-d4",
        *,
        done: int = 40,
        nll: float = 2.0,
        judged: bool = True,
        environment: bool = True,
        **fields: Any,
    ) -> Path:
        folder = tmp_path / name
        run = Run.create(folder, config(preset, **fields))
        lines: list[dict[str, Any]] = []
        for step in range(1, done + 1):
            lines.append(
                {
                    "kind": "train",
                    "step": step,
                    "loss": 5.5 - 3 * step / 40,
                    "lr": 1e-3,
                    "grad_norm": 1.0,
                    "tokens": 2048,
                    "supervised_tokens": 160,
                    "samples": 8 * step,
                    "seconds": 0.25,
                    "tokens_per_s": 8192.0,
                }
            )
            if step % 10 == 0:
                # The lowest is at step 30.
                value = nll + abs(step - 30) / 100
                lines.append(
                    {
                        "kind": "evaluation",
                        "step": step,
                        "split": "dev",
                        "nll": value,
                        "nll_sum": 100 * value,
                        "tokens": 100,
                        "accuracy": 0.5,
                        "best": step <= 30,
                    }
                )
        if lines:
            run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        if environment:
            _write(
                folder / "environment.json", {"torch": "2.13.0", "device": "cpu", "git_revision": None, "earlier": []}
            )
        if judged:
            source = {"nll": nll, "nll_sum": 50 * nll, "tokens": 50, "accuracy": 0.5, "rows": 3}
            whole = {"step": 30, "finished": True, "weights_sha256": SHA, "data_sha256": SHA}
            _write(
                folder / "evaluation" / "test.json",
                {**whole, "split": "test", **source, "tokens": 1234, "sources": {"algebra__linear_1d": source}},
            )
            _write(
                folder / "evaluation" / "answers.json",
                {
                    **whole,
                    "origin": "generated",
                    "accuracy": 0.25,
                    "correct": 6,
                    "questions": 24,
                    "untrained": 0.0,
                    "commonest": 0.125,
                    "modules": {"algebra__linear_1d": {"accuracy": 0.25, "correct": 6, "questions": 24}},
                    "samples": [
                        {
                            "module": "algebra__linear_1d",
                            "prompt": f"Solve {HOSTILE} for x.\n",
                            "answer": "<5>",
                            "generated": "&7",
                            "correct": False,
                        },
                        {
                            "module": "algebra__linear_1d",
                            "prompt": "What is 1 + 1?\n",
                            "answer": "2",
                            "generated": "2",
                            "correct": True,
                        },
                    ],
                },
            )
        return folder

    return make


def _write(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(data))

"""What several processes do in the tests: `torchrun -m tests.training.several DATA OUT`; the first writes OUT/several.json.

One start for all of it, since each costs seconds.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch

import tangolm
from tangolm.data.loader import Batch
from tangolm.data.shards import open_split
from tangolm.evaluation.nll import evaluate
from tangolm.models import LanguageModel
from tangolm.training import OptimizerConfig, Run, RunConfig, TrainingError, build_optimizer, run_config, train
from tangolm.training.distributed import ElsewhereError, Parallel, World, joined, whole
from tangolm.training.environment import Place
from tangolm.training.update import accumulate, update
from tests.training.sums import TINY

HERE = Place(torch.device("cpu"), "float32")
MODELS: dict[str, dict[str, Any]] = {
    "tango": {"preset": "tango-mini-d4"},
    "untied": {"preset": "untied-mini-d4"},
    "windowed": {"preset": "windowed-tango-mini-d4", "window": 8},
    "3 sets": {"preset": "tango-3-sets-mini-d4"},
    "rotating": {"preset": "rotating-tango-mini-d4"},
    "tango, recomputing": {"preset": "tango-mini-d4"},
    "untied, recomputing": {"preset": "untied-mini-d4"},
}
KINDS = ("ddp", "fsdp")


def build(name: str) -> LanguageModel:
    options = dict(MODELS[name])
    config = tangolm.preset(
        options.pop("preset"), vocab_size=97, context=128, depth=3 if "sets" in name else 2, **options
    )
    model = tangolm.build_model(config, seed=5)
    model.recompute("recomputing" in name)
    return model


def uneven(sequences: int) -> Batch:
    """Samples with 11 and 101 supervised tokens in turn."""
    tokens = torch.randint(0, 97, (sequences, 120), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[0::2, 12:] = -100
    labels[1::2, 102:] = -100
    labels[:, 0] = -100
    return Batch(tokens, labels, None, torch.arange(sequences))


def own(batch: Batch, world: World) -> Batch:
    rows = torch.tensor(world.share(len(batch.input_ids)))
    return Batch(batch.input_ids[rows], batch.labels[rows], None, batch.sample_ids[rows])


def gradients(world: World) -> list[dict[str, Any]]:
    """Over the processes against one process with the whole batch; and one step of AdamW on it."""
    found = []
    for name, kind, (sequences, micro) in itertools.product(MODELS, KINDS, [(2, 1), (5, 2)]):
        batch = uneven(sequences)
        alone, together = build(name), build(name)
        loss, tokens = accumulate(Parallel(alone), batch, micro_batch=sequences, place=HERE)
        parallel = Parallel(together, world, kind)
        passes = -(-world.largest_share(sequences) // micro)
        arguments = {"micro_batch": micro, "place": HERE, "passes": passes}
        ours, counted = accumulate(parallel, own(batch, world), **arguments)
        worst = ("", 0.0)
        expected = {key: p.grad for key, p in alone.named_parameters() if p.grad is not None}
        for key, parameter in together.named_parameters():
            assert parameter.grad is not None, key
            error = (whole(parameter.grad) - expected[key]).abs().max() / expected[key].abs().max()
            worst = max(worst, (key, float(error)), key=lambda pair: pair[1])
        options = OptimizerConfig(peak_lr=1e-3)
        done = [
            update(p, build_optimizer(p.model, options), b, lr=1e-3, clip=0.1, **a)
            for p, b, a in (
                (Parallel(alone), batch, {**arguments, "passes": None}),
                (parallel, own(batch, world), arguments),
            )
        ]
        moved = [{key: whole(p) for key, p in model.named_parameters()} for model in (alone, together)]
        found.append(
            {
                "name": name,
                "kind": kind,
                "sequences": sequences,
                "loss": [loss, ours],
                "tokens": [tokens, counted],
                "worst": worst,
                "grad_norm": [one.grad_norm for one in done],
                "moved": max(float((moved[0][key] - moved[1][key]).abs().max()) for key in moved[0]),
            }
        )
    return found


def evaluations(world: World, data: Path) -> list[dict[str, Any]]:
    """Of 1 and several processes, with each batch size and row limit; sharded too."""
    split, found = open_split(data, "dev"), []
    options = {"vocab_size": 257, "context": 48, "depth": 2}
    alone = tangolm.build_model(tangolm.preset("untied-mini-d4", **options), seed=5)
    for kind in KINDS:
        model = tangolm.build_model(tangolm.preset("untied-mini-d4", **options), seed=5)
        Parallel(model, world, kind)
        for size, rows in itertools.product((1, 3, 8), (None, 7, 1)):
            expected, ours = evaluate(alone, split, size, rows), evaluate(model, split, size, rows, processes=world)
            found.append(
                {
                    "kind": kind,
                    "rows": [expected.rows, ours.rows],
                    "tokens": [expected.tokens, ours.tokens],
                    "nll": [expected.nll, ours.nll],
                    "sources": expected.sources.keys() == ours.sources.keys(),
                }
            )
    return found


def config(data: Path, *overrides: str, preset: str = "tango-mini-d4", **fields: Any) -> RunConfig:
    fields = {"batch_size": 5, "device": "cpu", "steps": 12, "evaluate_every": 4, "evaluation_rows": 7, **fields}
    return run_config(preset, data, [*TINY, *overrides], **fields)


# Folder -> configuration; the tests compare them with one another and with a process alone.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("tango-mini-d4", {}),
    "ddp-again": ("tango-mini-d4", {}),
    "fsdp": ("tango-mini-d4", {"parallel": "fsdp"}),
    "fsdp-untied": ("untied-mini-d4", {"parallel": "fsdp"}),
    "ddp-untied": ("untied-mini-d4", {}),
    "accumulated": ("tango-mini-d4", {"micro_batch": 1}),
    "recomputed": ("tango-mini-d4", {"recompute": True}),
    "ddp-unevaluated": ("tango-mini-d4", {"evaluate_every": 12}),
    "fsdp-unevaluated": ("tango-mini-d4", {"evaluate_every": 12, "parallel": "fsdp"}),
    "ddp-bf16": ("tango-mini-d4", {"precision": "bf16", "steps": 4}),
    "fsdp-bf16": ("tango-mini-d4", {"precision": "bf16", "steps": 4, "parallel": "fsdp"}),
    "epoch": ("tango-mini-d4", {"steps": None, "epochs": 1.0, "batch_size": 11}),
}


def runs(world: World, data: Path, out: Path) -> None:
    for name, (preset, fields) in RUNS.items():
        train(config(data, preset=preset, **fields), out / name, progress=False)
    for name in ("ddp", "fsdp"):
        halves = config(data, parallel=name)
        for _ in range(2):
            train(halves, out / f"{name}-halves", resume=True, stop_after=6, progress=False)
        train(halves, out / f"{name}-to-one", stop_after=6, progress=False)
    # From one process to several, and from one way of holding the model to the other.
    train(config(data), out / "from-one", resume=True, progress=False)
    train(config(data, parallel="fsdp"), out / "ddp-to-fsdp", stop_after=6, progress=False)
    train(config(data), out / "ddp-to-fsdp", resume=True, progress=False)


def refusals(world: World, data: Path, out: Path) -> list[str]:
    """What each process says where all refuse, where one does, and where the first cannot write."""
    said = []

    def only_the_second() -> None:
        if world.rank == 1:
            raise OSError("no such disk")

    def diverge() -> None:
        train(config(data, "optimizer.peak_lr=1e30", "optimizer.clip=null"), out / "diverged", progress=False)

    def changed_data() -> None:
        train(config(out / "changed"), out / "unread", progress=False)

    for attempt in (
        lambda: train(config(data, batch_size=1), out / "small", progress=False),
        lambda: train(config(data), out / "ddp", progress=False),
        lambda: world.agree(only_the_second),
        changed_data,
        diverge,
    ):
        try:
            attempt()
        except (ElsewhereError, TrainingError, ValueError, OSError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def main() -> None:
    data, out = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    with joined() as world:
        if world.size == 2:
            record = {"gradients": gradients(world), "evaluations": evaluations(world, data)}
            runs(world, data, out)
            (out / f"said-{world.rank}.json").write_text(json.dumps(refusals(world, data, out)))
            if world.first:
                record["best"] = Run(out / "ddp").best().name
                (out / "several.json").write_text(json.dumps(record))
        else:
            for name in ("ddp", "fsdp"):
                train(config(data, parallel=name), out / f"{name}-{world.size}", progress=False)


if __name__ == "__main__":
    main()

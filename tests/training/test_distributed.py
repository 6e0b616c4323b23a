"""Several processes against one: gradients, evaluation, whole runs, resuming across them, and one that dies.

`tests.training.several` is what the processes do; all of it is one start, whose results the tests read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tangolm.training import Run, train
from tests.training.several import KINDS, MODELS, RUNS, config
from tests.training.sums import same_bits, weights

STEPS = 12
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]  # one worker: the start is shared


def command(processes: int, *arguments: object) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [*torchrun, "-m", *map(str, arguments)]


def torchrun(processes: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command(processes, *arguments), capture_output=True, text=True, timeout=540, env=environment, check=False
    )


@pytest.fixture(scope="module")
def out(sums: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    train(config(sums), folder / "alone", progress=False)
    train(config(sums, preset="untied-mini-d4"), folder / "alone-untied", progress=False)
    train(config(sums, batch_size=11, steps=None, epochs=1.0), folder / "alone-epoch", progress=False)
    train(config(sums), folder / "from-one", stop_after=6, progress=False)
    train(config(sums, precision="bf16", steps=4), folder / "alone-bf16", progress=False)
    shard = shutil.copytree(sums, folder / "changed") / "train-00000.tokens.npy"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    done = torchrun(2, "tests.training.several", sums, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def record(out: Path) -> dict[str, Any]:
    return json.loads((out / "several.json").read_text())


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in Run(run).metrics() if line["kind"] == "train"]


def close(ours: list[float], theirs: list[float]) -> None:
    """To 1e-6 for the first steps; rounding then grows as training amplifies it."""
    assert len(ours) == len(theirs)
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        assert one == pytest.approx(other, rel=1e-6 if step <= 4 else 1e-4), step


@pytest.mark.case(20)
def test_gradients_and_steps_are_those_of_one_process(record: dict[str, Any]) -> None:
    found = record["gradients"]
    assert len(found) == 2 * len(MODELS) * len(KINDS)
    for one in found:
        where = (one["name"], one["kind"], one["sequences"])
        assert one["tokens"][0] == one["tokens"][1] == {2: 112, 5: 235}[one["sequences"]], where
        assert one["loss"][1] == pytest.approx(one["loss"][0], rel=1e-6), where
        assert one["worst"][1] < 2e-6, (where, one["worst"])
        assert one["grad_norm"][1] == pytest.approx(one["grad_norm"][0], rel=1e-5), where
        # AdamW's first step is lr times a sign, wherever the gradient is above rounding.
        assert one["moved"] < 1e-5, where


@pytest.mark.case(21, 27)
def test_evaluation_counts_every_token_once(record: dict[str, Any]) -> None:
    assert len(record["evaluations"]) == len(KINDS) * 9
    for one in record["evaluations"]:
        assert one["rows"][0] == one["rows"][1]
        assert one["tokens"][0] == one["tokens"][1]
        assert one["nll"][1] == pytest.approx(one["nll"][0], rel=1e-9)
        assert one["sources"]


def test_processes_see_the_same_examples_as_one(out: Path) -> None:
    for name in RUNS:
        if "unevaluated" in name or "bf16" in name:  # below
            continue
        alone = out / ("alone-untied" if "untied" in name else "alone-epoch" if name == "epoch" else "alone")
        ours, theirs = Run(out / name).metrics(), Run(alone).metrics()
        for key in ("step", "samples", "tokens", "supervised_tokens", "lr", "kind"):
            assert [line.get(key) for line in ours] == [line.get(key) for line in theirs], (name, key)
        close(losses(out / name), losses(alone))


@pytest.mark.case(22)
@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_leaves_no_trace(out: Path, kind: str) -> None:
    assert losses(out / f"{kind}-unevaluated") == losses(out / kind)


@pytest.mark.case(18)
@pytest.mark.parametrize("kind", KINDS)
def test_bf16_keeps_float32_weights(out: Path, kind: str) -> None:
    run = Run(out / f"{kind}-bf16")
    assert {tensor.dtype for tensor in weights(run.last()).values()} == {torch.float32}
    assert losses(run.folder) == pytest.approx(losses(out / "alone-bf16"), rel=2e-3)
    assert losses(run.folder) != losses(out / kind)[:4]


def test_the_same_number_of_processes_gives_the_same_bits(out: Path) -> None:
    assert losses(out / "ddp") == losses(out / "ddp-again")
    assert same_bits(weights(Run(out / "ddp").last()), weights(Run(out / "ddp-again").last()))


@pytest.mark.case(27)
def test_an_uneven_last_batch_neither_hangs_nor_counts_twice(out: Path, sums: Path) -> None:
    run = Run(out / "epoch")
    last = [line for line in run.metrics() if line["kind"] == "train"][-1]
    rows = json.loads((sums / "manifest.json").read_text())["splits"]["train"]
    assert rows["rows"] % 11 == 1  # the second process has nothing in the last step
    assert last["samples"] == rows["rows"]
    assert sum(line["supervised_tokens"] for line in run.metrics() if line["kind"] == "train") == sum(
        line["supervised_tokens"] for line in Run(out / "alone-epoch").metrics() if line["kind"] == "train"
    )


@pytest.mark.case(24)
@pytest.mark.parametrize("kind", KINDS)
def test_resuming_with_as_many_processes_is_bitwise(out: Path, kind: str) -> None:
    assert losses(out / f"{kind}-halves") == losses(out / kind)
    assert same_bits(weights(Run(out / f"{kind}-halves").last()), weights(Run(out / kind).last()))


@pytest.mark.case(30)
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_goes_on_with_the_checkpoint_of_two(out: Path, sums: Path, kind: str) -> None:
    folder = out / f"{kind}-to-one"
    assert Run(folder).last().name == "step-00000006"
    train(config(sums), folder, resume=True, progress=False)
    assert Run(folder).config.parallel == "ddp"
    close(losses(folder), losses(out / "alone"))


@pytest.mark.case(30)
@pytest.mark.parametrize("name", ["from-one", "ddp-to-fsdp"])
def test_several_processes_go_on_with_any_checkpoint(out: Path, name: str) -> None:
    assert len(losses(out / name)) == STEPS
    close(losses(out / name), losses(out / "alone"))


@pytest.mark.case(29)
def test_the_process_that_met_the_mistake_tells_of_it(out: Path) -> None:
    first, second = (json.loads((out / f"said-{rank}.json").read_text()) for rank in range(2))
    assert len(first) == len(second) == 5
    for one, other, said in (
        (first[0], second[0], "ConfigError: batch_size 1 .* below the 2 processes"),
        (first[1], second[1], "ValueError: out .* already holds a run"),
        (second[2], first[2], "OSError: no such disk"),
        (first[3], second[3], r"ValueError: .*train-00000\.tokens\.npy"),
    ):
        assert re.search(said, one)
        assert other.startswith("ElsewhereError: process")
    assert first[4].startswith("TrainingError: step 2: loss is nan on samples 5 to 9")
    assert second[4].startswith("ElsewhereError")


def test_four_processes(out: Path, sums: Path) -> None:
    done = torchrun(4, "tests.training.several", sums, out)
    assert done.returncode == 0, done.stderr[-3000:]
    for kind in KINDS:
        close(losses(out / f"{kind}-4"), losses(out / "alone"))


@contextlib.contextmanager
def started(processes: int, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        command(processes, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def workers(agent: int) -> list[int]:
    found = Path(f"/proc/{agent}/task/{agent}/children")
    if not found.exists():
        pytest.skip("the children of a process are read from /proc")
    return [int(pid) for pid in found.read_text().split()]


def wait_for(condition: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)


def test_a_process_that_dies_ends_the_run_with_a_message(sums: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ["--preset", "tango-mini-d4", "--steps", "100000", "--batch-size", "4"]
    arguments += [
        "--set",
        "model.depth=2",
        "--set",
        "model.gated_width=96",
        "--set",
        "device=cpu",
        "--set",
        "checkpoint_every=5",
    ]
    with started(2, "tangolm", "train", *arguments, "--data", sums, "--out", run) as child:
        wait_for(lambda: Run.exists(run) and any(run.glob("checkpoints/step-*")))
        os.kill(workers(child.pid)[1], signal.SIGKILL)
        _, said = child.communicate(timeout=60)
    assert child.returncode != 0
    assert said.count("has lost another one") == 1
    assert "go on with --resume" in said
    resumed = torchrun(2, "tangolm", "train", "--out", run, "--resume", "--stop-after", 3, "--quiet")
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    assert resumed.stdout.count("stopped at step") == 1
    steps = [line["step"] for line in Run(run).metrics() if line["kind"] == "train"]
    assert steps == list(range(1, len(steps) + 1))


def test_only_the_first_process_talks(sums: Path, tmp_path: Path) -> None:
    refused = torchrun(2, "tangolm", "train", "--out", tmp_path / "run", "--preset", "tango-mini-d9", "--data", sums)
    assert refused.returncode != 0
    assert refused.stderr.count("error: preset") == 1
    other = torchrun(2, "tangolm", "presets")
    assert other.stderr.count("presets does not run in 2 processes; train does") == 1

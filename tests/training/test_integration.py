"""A real run on text, with the defaults, through kills: it ends on the bits of the undisturbed one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tangolm import data
from tangolm.training import Run, checkpoint, run_config
from tests.training.sums import same_bits, weights

TRAIN = textwrap.dedent(
    """
    import sys
    from tangolm.training import Run, train
    result = train(Run(sys.argv[1]).config, sys.argv[1], resume=True)
    print(result.message)
    sys.exit(result.exit_code)
    """
)


def start(run: Run) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", TRAIN, str(run.folder)]
    # One thread: two on tensors this small wait for each other, above all on a busy machine.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(run: Run) -> None:
    child = start(run)
    said, shown = child.communicate(timeout=300)
    assert child.returncode == 0, shown
    assert said.startswith("finished at step 60 of 60")


@pytest.mark.slow
@pytest.mark.case(24, 28)
@pytest.mark.parametrize("preset", ["tango-mini-d4", "loop-mini-d4"])
def test_a_killed_run_ends_where_the_undisturbed_one_does(tmp_path: Path, preset: str) -> None:
    source = Path(__file__).parent
    data.prepare("text", source, tmp_path / "data", context=64)
    config = run_config(
        preset, tmp_path / "data", device="cpu", steps=60, batch_size=4, evaluation_rows=8, evaluate_every=10
    )
    straight = Run.create(tmp_path / "straight", config)
    finish(straight)
    run = Run.create(tmp_path / "run", config)
    draw = random.Random(0)
    codes = []
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        child = start(run)
        try:
            begun, wanted = len(run.metrics()), draw.randrange(1, 12)
            deadline = time.monotonic() + 120
            while len(run.metrics()) < begun + wanted and time.monotonic() < deadline and child.poll() is None:
                time.sleep(0.005)
            child.send_signal(number)
            child.communicate(timeout=120)
        finally:
            child.kill()
        codes.append(child.returncode)
        for folder in checkpoint.checkpoints(run.checkpoints):
            checkpoint.verify(folder)
    assert codes == [-9, 143, -9, 130]
    finish(run)
    for kind in ("train", "evaluation"):
        steps = [record["step"] for record in run.metrics() if record["kind"] == kind]
        assert steps == list(range(1, 61) if kind == "train" else range(10, 61, 10))
    values = [[record.get("loss", record.get("nll")) for record in each.metrics()] for each in (straight, run)]
    assert values[0] == values[1]
    assert same_bits(weights(run.last()), weights(straight.last()))
    assert same_bits(weights(run.best()), weights(straight.best()))

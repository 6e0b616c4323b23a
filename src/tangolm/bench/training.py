"""A training as a user starts it: `tangolm train` in a process of its own, or in several under `torchrun`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from tangolm.training import Run, RunConfig
from tangolm.training.probe import child_environment


def train(config: RunConfig, folder: Path, processes: int = 1) -> Run:
    """Train in `folder`, the threads of this process shared out among the processes.

    Raises:
        RuntimeError: a training that failed, with what it said.
    """
    run = Run.create(folder, config)
    command = [sys.executable, "-m"]
    if processes > 1:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    threads = max(1, torch.get_num_threads() // processes)
    done = subprocess.run(
        [*command, "tangolm", "train", "--resume", "--quiet", "--out", str(folder)],
        capture_output=True,
        text=True,
        env={**child_environment(), "OMP_NUM_THREADS": str(threads)},
    )
    if done.returncode:
        raise RuntimeError(f"training in {processes} process(es) ended with {done.returncode}: {done.stderr[-2000:]}")
    return run

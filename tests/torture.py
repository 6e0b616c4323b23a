"""Kills and a full disk: `python -m tests.torture [PROCESSES ...] [--parallel fsdp] [--seed N]`, on Linux; `make torture`.

For each number of processes (1 where none is given) a run of 60 tiny steps is trained undisturbed. A second one is killed ten
times (SIGKILL, SIGTERM, SIGINT; while it starts, in steps, evaluations, saves and removals) and resumed each time; a third one
meets a disk that is full in the middle of a save. Both must end on the same bits as the first one, with the same
`metrics.jsonl` line for line but for what clocks say, and behind each blow every checkpoint must be whole.

The trainer is the command that users run, with nothing patched: where it is shows in its files (`phase`), so that a blow can be
timed from outside, and behind a SIGKILL they tell exactly what it hit. The disk fills up by RLIMIT_FSIZE, set on the running
process during a save: the kernel then refuses a real write with a real error (EFBIG), in the middle of a file, without a
privilege (a small file system of its own would need one).

A difference is printed and makes the exit code 1; the folder is left for inspection.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tangolm import data
from tangolm.training import Run, checkpoint
from tests.training.sums import MEASURED, same_bits, weights

ROOT = Path(__file__).parents[1]
STEPS, EVALUATE, SAVE, KEEP = 60, 3, 2, 2
SETTINGS = {
    "steps": STEPS,
    "batch_size": 4,
    "device": "cpu",
    "evaluate_every": EVALUATE,
    "evaluation_rows": 16,
    "checkpoint_every": SAVE,
    "keep_last": KEEP,
    "model.depth": 2,
    "model.gated_width": 256,
}
KILLS = 10
FULL = 3  # times that the disk fills up
LATEST = 50  # the last step from which a blow may be waited for: it must come before the run ends
STARTED, PATIENCE = 0.5, 120.0  # s: what a start takes at least; what anything takes at most
NAMES = {signal.SIGKILL: "SIGKILL", signal.SIGTERM: "SIGTERM", signal.SIGINT: "SIGINT"}


class Wrong(Exception):
    """What must not be; the message says what and where."""


@dataclass(frozen=True)
class Launch:
    """The command that trains, in some number of processes."""

    data: Path
    processes: int
    parallel: str = "ddp"

    def command(self, out: Path) -> list[str]:
        several = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(self.processes), "-m", "tangolm"]
        command = [sys.executable, "-m", *(["tangolm"] if self.processes == 1 else several)]
        command += ["train", "--out", str(out), "--resume", "--quiet"]
        if not Run.exists(out):
            command += ["--preset", "tango-mini-d4", "--data", str(self.data)]
            for name, value in {**SETTINGS, "parallel": self.parallel}.items():
                command += ["--set", f"{name}={value}"]
        return command

    @contextmanager
    def start(self, out: Path) -> Iterator[subprocess.Popen[str]]:
        """The trainer of a run, gone with all its processes at the end."""
        # One thread: more on tensors this small wait for each other, above all on a busy machine.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        child = subprocess.Popen(self.command(out), cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)
        try:
            yield child
        finally:
            for process in family(child.pid):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            child.communicate()

    def finish(self, out: Path) -> None:
        with self.start(out) as child:
            said, shown = child.communicate(timeout=PATIENCE)
        if child.returncode != 0 or f"finished at step {STEPS} of {STEPS}" not in said:
            raise Wrong(f"{out.name}: the run did not end well, exit code {child.returncode}: {said} {shown[-2000:]}")

    def name(self) -> str:
        return "1 process" if self.processes == 1 else f"{self.processes} processes ({self.parallel})"


def family(pid: int) -> list[int]:
    """The process and its descendants, parents first."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):  # it has ended by now
                continue
            children.setdefault(parent, []).append(int(folder.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found


def last_record(out: Path) -> dict[str, Any] | None:
    """The last whole line of the metrics; read from the end, because this is asked a thousand times a second."""
    try:
        with open(out / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().split(b"\n")[:-1]
        return json.loads(lines[-1]) if lines else None
    except (FileNotFoundError, ValueError):  # not yet there, or read while it was being replaced
        return None


def phase(out: Path) -> str:
    """What the trainer of a run is doing, by its files: "start" before the first record, "step", "evaluation", "save" or
    "removal" (of checkpoints that are no longer kept)."""
    root = out / "checkpoints"
    names = os.listdir(root) if root.is_dir() else []
    if any(name.startswith(f"{checkpoint.TEMPORARY}removed-") for name in names):
        return "removal"
    if any(name.startswith(checkpoint.TEMPORARY) for name in names):
        return "save"
    record = last_record(out)
    if record is None:
        return "start"
    if record["kind"] == "train" and record["step"] % EVALUATE == 0:
        return "evaluation"
    return "step"


def await_phase(child: subprocess.Popen[str], out: Path, step: int, wanted: str) -> None:
    """Wait until the run is past `step` and in the phase."""
    deadline = time.monotonic() + PATIENCE
    past = False
    while time.monotonic() < deadline and child.poll() is None:
        past = past or ((record := last_record(out)) is not None and record["step"] >= step)
        if past and phase(out) == wanted:
            return
        time.sleep(0.0005)
    shown = child.communicate()[1] if child.poll() is not None else "it is still running"
    raise Wrong(f"{out.name}: no {wanted} came behind step {step}: {shown[-2000:]}")


def check_whole(out: Path, least: int) -> list[int]:
    """The steps of the checkpoints, each verified; the newest is at least `least`."""
    found = checkpoint.checkpoints(out / "checkpoints")
    for folder in found:
        checkpoint.verify(folder)
    steps = [checkpoint.step_of(folder) for folder in found]
    if least and (not steps or steps[-1] < least):
        raise Wrong(f"{out.name}: checkpoints {steps}, but step {least} was saved before")
    return steps


def compare(out: Path, straight: Path) -> None:
    """The two runs ended on the same bits and wrote the same metrics."""
    ours, theirs = Run(out), Run(straight)
    for which in ("last", "best"):
        one, two = getattr(ours, which)(), getattr(theirs, which)()
        if one.name != two.name or not same_bits(weights(one), weights(two)):
            raise Wrong(f"{out.name}: the {which} checkpoint {one.name} is not that of the undisturbed run, {two.name}")
    lines = [
        [{k: v for k, v in record.items() if k not in MEASURED} for record in run.metrics()] for run in (ours, theirs)
    ]
    for number, (one, two) in enumerate(zip(*lines, strict=False), start=1):
        if list(one.items()) != list(two.items()):
            raise Wrong(f"{out.name}: line {number} of metrics.jsonl is {one}, of the undisturbed run {two}")
    if len(lines[0]) != len(lines[1]) or len(lines[0]) != STEPS + STEPS // EVALUATE:
        raise Wrong(f"{out.name}: metrics.jsonl has {len(lines[0])} lines, that of the undisturbed run {len(lines[1])}")
    left = [path.name for path in ours.checkpoints.iterdir() if path.name.startswith(".")]
    if left:
        raise Wrong(f"{out.name}: {left} is left over")


def kills(launch: Launch, out: Path, straight: Callable[[], Path], draw: random.Random) -> str:
    """The chain of kills."""
    numbers = [signal.SIGKILL] * 4 + [signal.SIGTERM] * 3 + [signal.SIGINT] * 3
    draw.shuffle(numbers)
    # SIGKILL meets every phase but the start; the others are drawn.
    hard = ["step", "evaluation", "save", "removal"]
    draw.shuffle(hard)
    wanted = [
        hard.pop() if number == signal.SIGKILL else draw.choice(["step", "evaluation", "save"]) for number in numbers
    ]
    wanted[draw.randrange(1, KILLS)] = "start"
    saved = 0
    for count, (number, what) in enumerate(zip(numbers, wanted, strict=True), start=1):
        with launch.start(out) as child:
            if what == "start":
                time.sleep(STARTED + draw.random() * 2)
                hit = "start"
            else:
                await_phase(child, out, max(saved + 1, LATEST * count // KILLS - draw.randrange(3)), what)
                time.sleep(draw.random() * 0.004)
                hit = phase(out)
            members = family(child.pid)
            victims = members if number == signal.SIGKILL else members[:1]
            if number == signal.SIGKILL and len(members) > 1 and draw.random() < 0.25:
                victims = [draw.choice(members[1:])]  # one process of several: the others must end by themselves
            for victim in victims:
                os.kill(victim, number)
            try:
                shown = child.communicate(timeout=PATIENCE)[1]
            except subprocess.TimeoutExpired:
                raise Wrong(f"{out.name}: still running {PATIENCE:.0f} s behind {NAMES[number]} in {hit}") from None
            code, alone = child.returncode, launch.processes == 1
        if number == signal.SIGKILL and what != "start":
            hit = phase(out)
        good = code != 0 if not alone or what == "start" else code == (-9 if number == signal.SIGKILL else 128 + number)
        if not good:
            raise Wrong(f"{out.name}: exit code {code} behind {NAMES[number]} in {hit}: {shown[-2000:]}")
        steps = check_whole(out, saved)
        record = last_record(out)
        reached = record["step"] if record else 0
        saved = steps[-1] if steps else 0
        if what != "start" and saved < (reached if number != signal.SIGKILL and alone else reached - SAVE):
            raise Wrong(f"{out.name}: step {reached} was reached, but the newest checkpoint is of step {saved}")
        some = "" if len(victims) in (1, len(members)) and alone else f" to {len(victims)} of {len(members)} processes"
        print(
            f"{launch.name()}, kill {count:>2} of {KILLS}: {NAMES[number]}{some} at step {reached} in {hit}; "
            f"whole: {', '.join(map(str, steps)) or 'none'}",
            flush=True,
        )
    launch.finish(out)
    compare(out, straight())
    return f"{launch.name()}: {KILLS} kills, the same bits and the same metrics as undisturbed"


def full_disk(launch: Launch, out: Path, straight: Path, draw: random.Random) -> str:
    """The chain of saves that a full disk ends."""
    sizes = {path.name: path.stat().st_size for path in Run(straight).last().iterdir()}
    model, optimizer = sizes["model.safetensors"], sizes[checkpoint.OPTIMIZER]
    other = 2 * max((straight / "metrics.jsonl").stat().st_size, sizes[checkpoint.TRAINER])
    if not other < model < optimizer:
        raise Wrong(f"the files of a checkpoint have no sizes that one limit could tell apart: {sizes}")
    saved = 0
    for count in range(1, FULL + 1):
        limit = draw.randrange(other, model) if count % 2 else draw.randrange(model, optimizer)
        with launch.start(out) as child:
            await_phase(child, out, max(saved + 1, LATEST * count // FULL - draw.randrange(8)), "save")
            before = checkpoint.checkpoints(out / "checkpoints")
            for process in family(child.pid):
                resource.prlimit(process, resource.RLIMIT_FSIZE, (limit, limit))
            shown = child.communicate(timeout=PATIENCE)[1]
        if child.returncode == 0 or "could not be written" not in shown or "--resume" not in shown:
            raise Wrong(
                f"{out.name}: exit code {child.returncode} with the disk full at {limit:,} bytes: {shown[-2000:]}"
            )
        steps = check_whole(out, checkpoint.step_of(before[-1]) if before else 0)
        left = [path.name for path in (out / "checkpoints").iterdir() if path.name.startswith(".")]
        if left:
            raise Wrong(f"{out.name}: the failed save left {left}")
        saved = steps[-1]
        record = last_record(out)
        print(
            f"{launch.name()}, full disk {count} of {FULL}: save of step {record['step'] if record else 0} cut at {limit:,} "
            f"bytes of {'model' if limit < model else 'optimizer'}.safetensors; whole: {', '.join(map(str, steps))}",
            flush=True,
        )
    launch.finish(out)
    compare(out, straight)
    return f"{launch.name()}: {FULL} full disks, the same bits and the same metrics as undisturbed"


def torture(processes: int, parallel: str, folder: Path, seed: int) -> list[str]:
    """Both chains, one beside the other."""
    launch = Launch(folder / "data", processes, parallel)
    with ThreadPoolExecutor(2) as pool:
        place = folder / f"{processes}-straight"
        straight = pool.submit(lambda: launch.finish(place) or place)
        killed = pool.submit(
            kills, launch, folder / f"{processes}-killed", straight.result, random.Random(f"{seed} kills {processes}")
        )
        disk = pool.submit(
            lambda: full_disk(
                launch, folder / f"{processes}-full", straight.result(), random.Random(f"{seed} full {processes}")
            )
        )
        return [killed.result(), disk.result()]


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill runs and fill their disk; they must end on the same bits.")
    parser.add_argument("processes", nargs="*", type=int, default=[1], help="numbers of processes (1)")
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp", help="how several hold the model (ddp)")
    parser.add_argument("--seed", type=int, default=None, help="of what is hit and when; drawn where not given")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
    folder = Path(tempfile.mkdtemp(prefix="torture-"))
    print(f"seed {seed}: {STEPS} steps, evaluation every {EVALUATE}, checkpoint every {SAVE}, {KEEP} kept and the best")
    started = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that no trainer is left behind
    data.prepare("text", ROOT / "tests" / "training", folder / "data", context=64)
    try:
        closing = [line for number in arguments.processes for line in torture(number, arguments.parallel, folder, seed)]
    except (Wrong, ValueError, subprocess.TimeoutExpired) as error:
        print(f"FAILED with seed {seed} after {time.monotonic() - started:.0f} s: {error}; see {folder}")
        return 1
    shutil.rmtree(folder)
    print(f"{'; '.join(closing)}; {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

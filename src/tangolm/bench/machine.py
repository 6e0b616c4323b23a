"""What a measurement ran on, how fast that machine multiplies matrices, and how much memory a call adds."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from tangolm.training.memory import peak_memory_bytes

PRODUCT = 2048  # rows and columns of the square product whose rate is the yardstick


@dataclass(frozen=True)
class Machine:
    """The part of a machine's description that a reader of a figure needs."""

    cpu: str
    cores: int
    threads: int
    system: str
    torch: str

    @classmethod
    def describe(cls) -> Machine:
        """This machine."""
        affinity = getattr(os, "sched_getaffinity", None)  # the cores this process may use; Linux only
        cores = len(affinity(0)) if affinity else os.cpu_count() or 1
        system = f"{platform.system()} {platform.machine()}"
        return cls(_cpu_model(), cores, torch.get_num_threads(), system, torch.__version__)

    def __str__(self) -> str:
        return f"{self.cpu}, {self.cores} cores, {self.threads} threads, {self.system}, torch {self.torch}"


def product_rate(dtype: torch.dtype, repeats: int = 3) -> float:
    """Operations a second (a multiply-add is two) of the best of some square products."""
    a, b = (torch.full((PRODUCT, PRODUCT), 0.5, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    best = min(seconds(lambda: torch.mm(a, b, out=out)) for _ in range(repeats + 1))  # the first warms up
    return 2 * PRODUCT**3 / best


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def extra_peak_bytes(prepare: Callable[..., Callable[[], object]], *arguments: Any) -> int | None:
    """How far a call lifts the peak memory of a fresh process above where it stood before the call.

    Args:
        prepare: a function of a module: makes the inputs and returns the call. It must leave no higher peak than it holds.
        arguments: its arguments.

    Returns:
        Bytes; None where the system does not tell a process its peak.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        return fresh.submit(_extra_peak, torch.get_num_threads(), prepare, *arguments).result()


def _extra_peak(threads: int, prepare: Callable[..., Callable[[], object]], *arguments: Any) -> int | None:
    torch.set_num_threads(threads)
    call = prepare(*arguments)
    before = peak_memory_bytes()
    call()
    after = peak_memory_bytes()
    return None if before is None or after is None else after - before


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()

"""What a device holds in all and has left, and the most that a process has taken of it so far.

| device | memory of a process                                               | what the device has                             |
|--------|-------------------------------------------------------------------|-------------------------------------------------|
| CPU    | the most resident pages, interpreter and libraries included       | RAM (Linux), or less where a control group says |
| CUDA   | the most bytes that its tensors took (`torch.cuda.max_memory_allocated`) | what the driver says                     |
| MPS    | not known                                                         | not known                                       |
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
LIMITS = {  # by version of control groups: limit, use, and what of the use is a cache that can be dropped
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


@dataclass(frozen=True)
class Memory:
    """Bytes of a device: all that a process could ever get, and what it can get now."""

    total: int
    available: int


def device_memory(device: torch.device) -> Memory | None:
    """What a device has; None where that cannot be found out."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Memory(total, free)
    return _host_memory() if device.type == "cpu" else None


def peak_memory_bytes(device: torch.device | None = None) -> int | None:
    """The most memory this process has held so far on a device (None: the host); None where that cannot be found out."""
    if device is not None and device.type != "cpu":
        return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    # Not getrusage on Linux: a new process begins there with the peak of the one that started it.
    peak = _fields(PROC / "self/status").get("VmHWM")
    if peak is not None:
        return peak
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _host_memory() -> Memory | None:
    ram = _fields(PROC / "meminfo")
    if "MemTotal" not in ram or "MemAvailable" not in ram:
        return None
    total, available = ram["MemTotal"] + ram.get("SwapTotal", 0), ram["MemAvailable"]
    for limit, used in _limits():
        total, available = min(total, limit), min(available, max(0, limit - used))
    return Memory(total, available)


def _limits() -> Iterator[tuple[int, int]]:
    """Limit and use of each control group that this process is in, the outer ones included."""
    try:
        lines = (PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version, root = (1, CGROUP / "memory") if controllers else (2, CGROUP)
        limit_name, use_name, cache_name = LIMITS[version]
        folder = root / path.strip("/")
        # In a container the path may be that of the host, of which only the root is there.
        for place in (folder, *(parent for parent in folder.parents if parent.is_relative_to(root))):
            try:
                limit, used = (place / limit_name).read_text(), (place / use_name).read_text()
                cache = next(
                    (
                        int(row.split()[1])
                        for row in (place / "memory.stat").read_text().splitlines()
                        if row.startswith(f"{cache_name} ")
                    ),
                    0,
                )
            except OSError:
                continue
            if limit.strip() != "max":
                yield int(limit), int(used) - cache


def _fields(path: Path) -> dict[str, int]:
    """Bytes by name in a file of lines "name:  number kB"; empty where there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    parts = [line.split() for line in lines]
    return {part[0].rstrip(":"): 1024 * int(part[1]) for part in parts if len(part) == 3 and part[2] == "kB"}

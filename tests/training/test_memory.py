"""What a device has, read from files of the system as it writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tangolm.training import memory
from tangolm.training.memory import Memory, device_memory, peak_memory_bytes

CPU = torch.device("cpu")
MEMINFO = "MemTotal:  1000 kB\nMemFree:  1 kB\nMemAvailable:  600 kB\nSwapTotal:  24 kB\nHugePages_Total:  0\n"
KB = 1024


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "CGROUP", tmp_path / "cgroup")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("", {}, Memory(1024 * KB, 600 * KB)),
        ("0::/\n", {"memory.stat": ""}, Memory(1024 * KB, 600 * KB)),
        (
            "0::/a/b\n",
            {"a/memory.max": "409600\n", "a/memory.current": "102400\n", "a/memory.stat": "inactive_file 51200\n"},
            Memory(400 * KB, 350 * KB),
        ),
        (
            "0::/a\n",
            {"a/memory.max": "max\n", "a/memory.current": "1\n", "a/memory.stat": ""},
            Memory(1024 * KB, 600 * KB),
        ),
        (  # a container sees its own group as the root, under a path of the host
            "5:cpu:/x\n4:memory:/docker/x\n0::/\n",
            {
                "memory/memory.limit_in_bytes": "204800\n",
                "memory/memory.usage_in_bytes": "204800\n",
                "memory/memory.stat": "cache 7\ntotal_inactive_file 1024\n",
            },
            Memory(200 * KB, KB),
        ),
        (
            "4:memory:/\n",
            {
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/memory.usage_in_bytes": "5\n",
                "memory/memory.stat": "",
            },
            Memory(1024 * KB, 600 * KB),
        ),
    ],
)
def test_the_smallest_limit_counts(system: Path, groups: str, files: dict[str, str], expected: Memory) -> None:
    write(system / "proc/meminfo", MEMINFO)
    write(system / "proc/self/cgroup", groups)
    for name, text in files.items():
        write(system / "cgroup" / name, text)
    assert device_memory(CPU) == expected


def test_nothing_is_known_elsewhere(system: Path) -> None:
    assert device_memory(CPU) is None
    assert device_memory(torch.device("mps")) is None
    assert peak_memory_bytes(torch.device("mps")) is None


@pytest.mark.skipif(peak_memory_bytes() is None, reason="the system does not tell a process its peak")
def test_the_peak_stays_when_memory_is_given_back() -> None:
    held = torch.ones(2 * (peak_memory_bytes() or 0) // 4)
    size = held.nbytes
    del held
    assert (peak_memory_bytes(CPU) or 0) >= size

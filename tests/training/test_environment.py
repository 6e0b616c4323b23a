"""Where a run computes, and its record."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tangolm.config import ConfigError
from tangolm.training import Run, RunConfig, environment, train


def test_auto_is_float32_on_a_cpu(tiny: Callable[..., RunConfig]) -> None:
    place = environment.choose(tiny())
    assert (place.device.type, place.precision) == ("cpu", "float32")
    assert isinstance(place.autocast(), contextlib.nullcontext)
    with environment.choose(tiny(precision="bf16")).autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_auto_takes_a_gpu_with_bf16(tiny: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    place = environment.choose(tiny(device="auto"))
    assert (place.device.type, place.precision) == ("cuda", "bf16")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    assert environment.choose(tiny(device="auto")).precision == "float32"
    with pytest.raises(ConfigError, match="precision 'bf16' is not available on cuda"):
        environment.choose(tiny(device="cuda", precision="bf16"))


def test_absent_device_is_refused(tiny: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device 'cuda' is not available here"):
        environment.choose(tiny(device="cuda"))


def test_every_start_is_recorded(tiny: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = tiny(impl="reference")
    train(config, tmp_path / "run", stop_after=3, progress=False)
    train(config, tmp_path / "run", resume=True, progress=False)
    record = Run(tmp_path / "run").environment()
    assert record is not None
    assert record["step"] == 3
    assert [earlier["step"] for earlier in record["earlier"]] == [0]
    assert record["torch"] == torch.__version__
    assert record["threads"] == torch.get_num_threads()
    assert record["impl"] == "reference"


def test_revision_is_of_this_package_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "installed.py"
    module.write_text("")
    monkeypatch.setattr(environment, "__file__", str(module))
    assert environment.git_revision() is None

    def git(*arguments: str) -> str:
        options = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *options, *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init")
    (tmp_path / "other.py").write_text("")
    git("add", "other.py")
    git("commit", "-m", "theirs")
    assert environment.git_revision() is None  # an environment inside another project's checkout
    git("add", "installed.py")
    git("commit", "-m", "ours")
    assert environment.git_revision() == git("rev-parse", "HEAD")
    module.write_text("changed = 1\n")
    assert environment.git_revision() == git("rev-parse", "HEAD") + "-dirty"

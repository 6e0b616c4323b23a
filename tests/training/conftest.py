"""A tiny prepared folder, and the configuration of a tiny run on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tangolm.training import RunConfig, run_config
from tests.training.sums import TINY, prepare_sums


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Two threads on tensors this small spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_sums(tmp_path_factory.mktemp("data") / "sums")


@pytest.fixture
def tiny(sums: Path) -> Callable[..., RunConfig]:
    def make(*overrides: str, data: Path = sums, preset: str = "tango-mini-d4", **fields: Any) -> RunConfig:
        fields = {"batch_size": 4, "device": "cpu", **fields}
        if not any(name in fields for name in ("steps", "tokens", "epochs")):
            fields["steps"] = 12
        return run_config(preset, data, [*TINY, *overrides], **fields)

    return make

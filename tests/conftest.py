"""Tests run on one thread each: tiny tensors gain nothing from more, and `make test` runs one process a core."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.training.sums import prepare_sums

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny prepared folder of sums."""
    return prepare_sums(tmp_path_factory.mktemp("data") / "sums")

"""A tiny prepared folder of sums, and a tiny model for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tangolm
from tangolm.models import LanguageModel
from tests.training.sums import CONTEXT, prepare_sums


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
def model() -> LanguageModel:
    config = tangolm.preset("tango-mini-d4", vocab_size=257, context=CONTEXT, depth=2, gated_width=96)
    return tangolm.build_model(config, seed=0, impl="reference")

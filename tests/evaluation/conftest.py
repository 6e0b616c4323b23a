"""A tiny model for the sums."""

from __future__ import annotations

import pytest

import tangolm
from tangolm.models import LanguageModel
from tests.training.sums import CONTEXT


@pytest.fixture
def model() -> LanguageModel:
    config = tangolm.preset("tango-mini-d4", vocab_size=257, context=CONTEXT, depth=2, gated_width=96)
    return tangolm.build_model(config, seed=0, impl="reference")

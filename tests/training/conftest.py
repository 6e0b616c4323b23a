"""The configuration of a tiny run on the sums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tangolm.training import RunConfig, run_config
from tests.training.sums import TINY


@pytest.fixture
def tiny(sums: Path) -> Callable[..., RunConfig]:
    def make(*overrides: str, data: Path = sums, preset: str = "tango-mini-d4", **fields: Any) -> RunConfig:
        fields = {"batch_size": 4, "device": "cpu", **fields}
        if not any(name in fields for name in ("steps", "tokens", "epochs")):
            fields["steps"] = 12
        return run_config(preset, data, [*TINY, *overrides], **fields)

    return make

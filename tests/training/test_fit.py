"""What cannot fit is refused with the largest batch that does; what may not fit is warned of; the rest costs nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tangolm.config import ConfigError
from tangolm.models import training_memory_bytes
from tangolm.training import Run, RunConfig, environment, fit, plan, train
from tangolm.training.distributed import World
from tangolm.training.memory import Memory
from tests.models.tiny import EVERY
from tests.models.tiny import tiny as tiny_model

Make = Callable[..., RunConfig]


def holds(monkeypatch: pytest.MonkeyPatch, total: int, available: int | None = None) -> None:
    memory = Memory(total, total if available is None else available)
    monkeypatch.setattr(fit, "device_memory", lambda device: memory)


def test_what_cannot_fit_is_refused_with_the_largest_that_does(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(batch_size=9)
    place = environment.choose(config)
    for fits in (1, 2, 5, 8):
        holds(monkeypatch, fit.estimated_bytes(config, place, micro_batch=fits))
        for refuse in (plan, lambda config: train(config, tmp_path / "run", progress=False)):
            with pytest.raises(ConfigError, match=rf"^micro_batch 9 needs at least .* fits is micro_batch={fits}$"):
                refuse(config)
    assert not (tmp_path / "run").exists()
    holds(monkeypatch, fit.estimated_bytes(config, place, micro_batch=9))
    assert fit.check_fits(config, place) is None


def test_recomputing_is_named_where_it_helps(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    config, recomputing = tiny("model.depth=6"), tiny("model.depth=6", recompute=True)
    place = environment.choose(config)
    holds(monkeypatch, fit.estimated_bytes(recomputing, place, micro_batch=1))
    with pytest.raises(ConfigError, match=r"not even micro_batch=1 fits; with recompute=true .* micro_batch=1$"):
        fit.check_fits(config, place)
    holds(monkeypatch, 1000)
    for hopeless in (config, recomputing):
        with pytest.raises(
            ConfigError, match=r"with recompute=true neither; take a smaller model or a shorter context$"
        ):
            fit.check_fits(hopeless, place)


def test_what_others_hold_is_a_warning(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(steps=1)
    place = environment.choose(config)
    holds(monkeypatch, 2**40, fit.estimated_bytes(config, place, micro_batch=2))
    assert "the largest that fits is micro_batch=2" in plan(config)["warning"]
    assert train(config, tmp_path / "run").ended == "finished"
    assert "the largest that fits is micro_batch=2" in capsys.readouterr().err
    assert Run(tmp_path / "run").last().name == "step-00000001"


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("impl", ["auto", pytest.param("reference", marks=pytest.mark.slow)])
def test_the_quick_bound_is_above_every_estimate(family: str, impl: str) -> None:
    for batch, context in ((1, 8), (3, 64), (2, 200)):
        model = tiny_model(family, context=context)
        config: Any = SimpleNamespace(model=model, batch_size=batch, micro_batch=None)
        assert training_memory_bytes(model, batch, impl=impl) < fit._surely_below(cast("RunConfig", config), batch)


def test_each_process_is_judged_by_its_share(monkeypatch: pytest.MonkeyPatch, tiny: Make) -> None:
    config = tiny(batch_size=16)
    place = environment.choose(config)
    alone, two = World(), World(0, 2, 0, 2)
    assert fit.estimated_bytes(config, place, two) == fit.estimated_bytes(config, place, alone, micro_batch=8)
    sharded = dataclasses.replace(config, parallel="fsdp")
    saved = fit.estimated_bytes(config, place, two) - fit.estimated_bytes(sharded, place, two)
    assert saved == 16 * config.model.parameters()["total"] // 2
    # Two processes of one machine have half its memory each.
    holds(monkeypatch, 2 * fit.estimated_bytes(config, place, two) - 2)
    with pytest.raises(ConfigError, match="micro_batch 8 needs at least"):
        fit.check_fits(config, place, two)
    assert fit.check_fits(config, place, World(0, 2, 0, 1)) is None

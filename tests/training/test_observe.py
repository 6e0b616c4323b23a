"""What a run records beside its losses, and which losses it calls spikes."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tangolm.data.loader import Loader
from tangolm.models import build_model
from tangolm.training import Run, RunConfig, TrainingError, observe, train
from tangolm.training import trainer as trainer_module
from tangolm.training.observe import SPIKE_WINDOW, Rates, Spikes, rows_named, temperatures
from tests.models.tiny import EVERY
from tests.models.tiny import tiny as tiny_model
from tests.training.sums import MEASURED

Make = Callable[..., RunConfig]


def falling(steps: int, noise: float, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [2 + 3 * math.exp(-step / 40) + draw.gauss(0, noise) for step in range(steps)]


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.15])
def test_noise_and_progress_are_no_spikes(noise: float) -> None:
    spikes = Spikes()
    assert [loss for loss in falling(1000, noise) if spikes.usual(loss) is not None] == []


def test_a_spike_is_above_all_that_is_usual() -> None:
    spikes = Spikes()
    losses = falling(SPIKE_WINDOW, 0.1)
    assert all(spikes.usual(loss) is None for loss in [*losses[:-1], 50.0])  # too early to know what is usual
    spikes = Spikes([2.0 + 0.1 * (-1) ** step for step in range(SPIKE_WINDOW)])
    assert spikes.usual(2.9) is None
    assert spikes.usual(3.2) == pytest.approx(2.1, abs=0.2)
    assert Spikes([1.0] * SPIKE_WINDOW).usual(1.1) is None
    assert Spikes([1.0] * SPIKE_WINDOW).usual(1.3) == 1.0


def test_a_spike_is_recorded_with_its_rows(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a resumed run judges by the losses before it was interrupted."""
    monkeypatch.setattr(observe, "SPIKE_WINDOW", 4)
    monkeypatch.setattr(observe, "SPIKE_MAD", 0.0)
    monkeypatch.setattr(observe, "SPIKE_LEAST", 1.0)
    update, at = trainer_module.update, []

    def spiking(*arguments: Any, **named: Any) -> Any:
        at.append(named["lr"])
        done = update(*arguments, **named)
        return SimpleNamespace(loss=done.loss + 9 * (len(at) == 7), grad_norm=done.grad_norm, tokens=done.tokens)

    monkeypatch.setattr(trainer_module, "update", spiking)
    config = tiny(checkpoint_every=5, evaluate_every=12)
    train(config, tmp_path / "run", stop_after=5)
    train(config, tmp_path / "run", resume=True)
    run = Run(tmp_path / "run")
    (spike,) = [record for record in run.metrics() if record["kind"] == "spike"]
    assert (spike["step"], spike["last_good_checkpoint"]) == (7, "step-00000005")
    assert spike["loss"] > spike["usual"] + 1
    from tangolm.training.run import open_data

    assert spike["sample_ids"] == Loader(open_data(config, "train"), 4, 101).batch(24).sample_ids.tolist()
    assert "step 7/12  a spike: loss" in capsys.readouterr().err
    straight = Run(_again(config, tmp_path / "straight", at))
    assert _timeless(straight) == _timeless(run)


def _again(config: RunConfig, out: Path, at: list[float]) -> Path:
    at.clear()
    return train(config, out, progress=False).folder


def _timeless(run: Run) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key not in MEASURED} for record in run.metrics()]


def test_a_stopped_run_names_its_rows(tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise trainer_module.NonFinite("loss is nan")

    monkeypatch.setattr(trainer_module, "update", broken)
    with pytest.raises(
        TrainingError, match=r"loss is nan on samples 0 to 3 \(rows \d+, \d+, \d+, \d+ of the training split\)"
    ):
        train(tiny(), tmp_path / "run", progress=False)
    (record,) = Run(tmp_path / "run").metrics()
    assert (record["kind"], record["step"], record["what"]) == ("diverged", 1, "loss is nan")
    assert len(record["sample_ids"]) == 4
    assert rows_named(list(range(20)), 2) == "rows 0, 1 and 18 more of the training split"


def test_steps_and_evaluations_say_what_they_cost(tiny: Make, tmp_path: Path) -> None:
    config = tiny(steps=4, evaluate_every=2)
    run = Run(train(config, tmp_path / "run", progress=False).folder)
    useful = config.model.macs()["useful_macs"]
    steps = [record for record in run.metrics() if record["kind"] == "train"]
    for record in steps:
        assert record["operations_per_s"] == pytest.approx(6 * useful * 4 / record["seconds"])
        assert record["utilisation"] is None
    peaks = [record["memory_bytes"] for record in steps]
    assert peaks == sorted(peaks)
    assert peaks[0] > 50e6
    assert (run.environment() or {})["peak_memory_bytes"] >= peaks[-1]
    for record in run.metrics():
        if record["kind"] == "evaluation":
            assert set(record["sources"]) == {"add", "subtract"}
            assert [len(taus) for taus in record["temperatures"].values()] == [2]
            assert record["seconds"] > 0
    last = run.load("last")
    assert record["temperatures"]["block 0"] == pytest.approx(last.blocks[0].temperature.tolist())  # type: ignore[union-attr]


@pytest.mark.parametrize("family", EVERY)
def test_temperatures_are_those_of_the_blocks(family: str) -> None:
    model = build_model(tiny_model(family))
    found = temperatures(model)
    named = [name for name, _ in model.named_parameters() if name.endswith("log_temperature")]
    assert len(found) == len(named)
    for taus in found.values():
        assert taus == pytest.approx([12.0] * len(taus))
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("kind", "name", "precision", "peak"),
    [
        ("cuda", "NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("cuda", "NVIDIA H100 PCIe", "bf16", 756e12),
        ("cuda", "NVIDIA A100-SXM4-80GB", "float32", 19.5e12),
        ("cuda", "NVIDIA L40S", "bf16", 362e12),
        ("cuda", "NVIDIA L4", "bf16", 121e12),
        ("cuda", "Some other device", "bf16", None),
        ("cpu", "NVIDIA L4", "float32", None),
    ],
)
def test_utilisation_needs_a_known_rate(tiny: Make, kind: str, name: str, precision: str, peak: float | None) -> None:
    place: Any = SimpleNamespace(device=torch.device(kind), name=name, precision=precision)
    config = tiny()
    got = Rates(config, place).of(8, 2.0)
    rate = 6 * config.model.macs()["useful_macs"] * 4
    assert got == {"operations_per_s": rate, "utilisation": None if peak is None else pytest.approx(rate / peak)}

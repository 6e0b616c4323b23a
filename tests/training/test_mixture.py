"""Training on a mixture: batches of its parts by a schedule, the joint NLL selects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from tangolm.data import mix
from tangolm.evaluation.nll import evaluate
from tangolm.training import Run, RunConfig, evaluate_run, plan, train
from tangolm.training.run import open_data
from tests.training.sums import prepare_sums, same_bits, weights

Make = Callable[..., RunConfig]


@pytest.fixture
def mixed(sums: Path, tmp_path: Path) -> Path:
    mix([sums, prepare_sums(tmp_path / "others", questions=80, seed=5)], tmp_path / "mixed")
    return tmp_path / "mixed"


@pytest.mark.case(24)
@pytest.mark.parametrize("schedule", ["alternate", "weights"])
def test_stopped_and_resumed_is_the_straight_run(
    tiny: Make, mixed: Path, sums: Path, tmp_path: Path, schedule: str
) -> None:
    mix([sums, tmp_path / "others"], mixed, schedule=schedule, overwrite=True)
    config = tiny(data=mixed, steps=7, evaluate_every=3)
    straight = train(config, tmp_path / "straight", progress=False)
    train(config, tmp_path / "parted", stop_after=2, progress=False)
    train(config, tmp_path / "parted", resume=True, stop_after=3, progress=False)
    parted = train(config, tmp_path / "parted", resume=True, progress=False)
    assert same_bits(weights(Run(straight.folder).last()), weights(Run(parted.folder).last()))
    seen = [
        [(record["step"], record["loss"]) for record in Run(folder).metrics() if record["kind"] == "train"]
        for folder in (straight.folder, parted.folder)
    ]
    assert len(seen[0]) == 7
    assert seen[0] == seen[1]


def test_the_joint_nll_is_the_mean_of_the_parts_and_selects(tiny: Make, mixed: Path, tmp_path: Path) -> None:
    config = tiny(data=mixed, steps=6, evaluate_every=2)
    run = Run(train(config, tmp_path / "run", progress=False).folder)
    evaluations = [record for record in run.metrics() if record["kind"] == "evaluation"]
    for record in evaluations:
        assert list(record["parts"]) == ["sums", "others"]
        assert record["nll"] == pytest.approx(sum(record["parts"].values()) / 2, rel=1e-12)
    best = min(evaluations, key=lambda record: record["nll"])
    result = evaluate_run(run, "dev")
    assert (result["step"], result["nll"]) == (best["step"], pytest.approx(best["nll"], rel=1e-12))
    assert {name: part["nll"] for name, part in result["parts"].items()} == pytest.approx(best["parts"], rel=1e-12)
    assert set(result["sources"]) == {f"{part}/{sign}" for part in ("sums", "others") for sign in ("add", "subtract")}


def test_parts_weigh_the_same_whatever_their_size(tiny: Make, mixed: Path, tmp_path: Path) -> None:
    run = Run(train(tiny(data=mixed, steps=2), tmp_path / "run", progress=False).folder)
    model, split = run.load("last"), open_data(run.config, "test")
    result = evaluate(model, split)
    alone = {name: evaluate(model, part) for name, part in split.parts.items()}  # pyright: ignore
    assert alone["sums"].tokens != alone["others"].tokens
    assert result.nll == (alone["sums"].nll + alone["others"].nll) / 2
    assert result.accuracy == (alone["sums"].accuracy + alone["others"].accuracy) / 2
    assert result.tokens == alone["sums"].tokens + alone["others"].tokens
    for name, own in alone.items():
        assert result.parts[name] == {
            key: getattr(own, key) for key in ("nll", "nll_sum", "tokens", "accuracy", "rows")
        }
    assert evaluate(model, split, limit_rows=3).rows == 6


def test_the_dry_run_and_moved_data(tiny: Make, mixed: Path, sums: Path, tmp_path: Path) -> None:
    config = tiny(data=mixed, epochs=1)
    rows = [part.rows for part in open_data(config, "train").parts.values()]  # pyright: ignore
    assert plan(config)["data"]["train_rows"] == sum(rows)
    assert plan(config)["samples"] == sum(rows)
    run = Run(train(tiny(data=mixed, steps=2), tmp_path / "run", progress=False).folder)
    (tmp_path / "deeper").mkdir()
    moved = mixed.rename(tmp_path / "deeper" / "mixed")
    with pytest.raises(ValueError, match="does not exist"):
        evaluate_run(run, "test", data=moved)  # its parts are not where it says
    mix([sums, tmp_path / "others"], moved, overwrite=True)
    assert evaluate_run(run, "test", data=moved)["step"] == 2
    mix([tmp_path / "others", sums], moved, overwrite=True)
    with pytest.raises(ValueError, match="data_sha256 is"):
        open_data(dataclasses.replace(run.config, data=str(moved)), "dev")
    other = evaluate_run(run, "dev", data=moved)
    assert other == run.evaluation(f"dev-{other['data_sha256'][:12]}")
    assert run.evaluation("dev") is None

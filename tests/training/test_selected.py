"""The test split is met once, by the selected checkpoint."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tangolm.data.shards import open_split
from tangolm.evaluation.nll import evaluate
from tangolm.training import CheckpointError, Run, RunConfig, evaluate_run, selected, train

Make = Callable[..., RunConfig]


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []

    def counted(model: Any, split: Any, *arguments: Any) -> Any:
        seen.append(split.name)
        return evaluate(model, split, *arguments)

    monkeypatch.setattr(selected, "evaluate", counted)
    return seen


def test_test_split_is_evaluated_once_and_kept(tiny: Make, tmp_path: Path, sums: Path, evaluations: list[str]) -> None:
    run = Run(train(tiny(), tmp_path / "run", progress=False).folder)
    first = evaluate_run(run, "test")
    assert evaluate_run(run.folder, "test", batch_size=3) == first == run.evaluation("test")
    assert evaluations == ["test"]
    expected = evaluate(run.load("best"), open_split(sums, "test"), 3)
    assert first["nll"] == pytest.approx(expected.nll, rel=1e-6)
    assert (first["tokens"], first["step"], first["finished"]) == (expected.tokens, 12, True)
    assert set(first["sources"]) == {"add", "subtract"}
    assert first["data_sha256"] == run.config.data_sha256


def test_dev_agrees_with_the_training_log(tiny: Make, tmp_path: Path) -> None:
    result = train(tiny(), tmp_path / "run", progress=False)
    assert evaluate_run(result.folder, "dev")["nll"] == pytest.approx(result.best_nll, rel=1e-12)


def test_another_best_checkpoint_does_not_meet_the_test_split(
    tiny: Make, tmp_path: Path, evaluations: list[str]
) -> None:
    config = tiny(evaluate_every=4)
    run = Run(train(config, tmp_path / "run", stop_after=4, progress=False).folder)
    first, dev = evaluate_run(run, "test"), evaluate_run(run, "dev")
    assert not first["finished"]
    train(config, run.folder, resume=True, progress=False)
    assert run.best().name == "step-00000012"
    with pytest.raises(ValueError, match=r"has met step 4 of run .* delete .*test\.json"):
        evaluate_run(run, "test")
    assert run.evaluation("test") == first
    assert evaluate_run(run, "dev")["nll"] < dev["nll"]
    assert evaluations == ["test", "dev", "dev"]


def test_data_that_moved_or_changed(tiny: Make, tmp_path: Path, sums: Path) -> None:
    data = shutil.copytree(sums, tmp_path / "data")
    run = Run(train(tiny(data=data), tmp_path / "run", progress=False).folder)
    moved = data.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="does not exist"):
        evaluate_run(run, "test")
    assert evaluate_run(run, "test", data=moved)["step"] == 12
    shard = moved / "dev-00000.tokens.npy"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    with pytest.raises(ValueError, match=r"dev-00000\.tokens\.npy"):
        evaluate_run(run, "dev", data=moved)
    with pytest.raises(ValueError, match="split 'best' is not in the data"):
        evaluate_run(run, "best", data=moved)


def test_damaged_best_checkpoint_is_refused(tiny: Make, tmp_path: Path) -> None:
    run = Run(train(tiny(), tmp_path / "run", progress=False).folder)
    path = run.best() / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not match its sha256"):
        evaluate_run(run, "test")
    assert run.evaluation("test") is None


def test_damaged_weights_do_not_look_like_another_checkpoint(tiny: Make, tmp_path: Path) -> None:
    run = Run(train(tiny(), tmp_path / "run", progress=False).folder)
    kept = evaluate_run(run, "test")
    assert dataclasses.replace(run.config, data="elsewhere").run_id == run.config.run_id
    assert evaluate_run(run, "test") == kept

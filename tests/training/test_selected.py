"""The test split is met once, by the selected checkpoint."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tangolm.cli import main
from tangolm.config import ConfigError
from tangolm.data import prepare
from tangolm.data.shards import open_split
from tangolm.evaluation.nll import evaluate
from tangolm.training import CheckpointError, Run, RunConfig, evaluate_run, selected, train
from tests.training.sums import CONTEXT, prepare_sums

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


def test_other_data_has_a_result_of_its_own(
    tiny: Make, tmp_path: Path, sums: Path, evaluations: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(train(tiny(evaluate_every=4), tmp_path / "run", stop_after=4, progress=False).folder)
    others = prepare_sums(tmp_path / "others", seed=9, context=2 * CONTEXT)
    own = evaluate_run(run, "test")
    other = evaluate_run(run, "test", data=others)
    assert (other["data"], other["finished"], own["finished"]) == (str(others), False, False)
    assert other["data_sha256"] != own["data_sha256"] == run.config.data_sha256
    name = f"test-{other['data_sha256'][:12]}"
    assert (run.evaluation("test"), run.evaluation(name)) == (own, other)
    expected = evaluate(run.load("best"), open_split(others, "test"), 3)
    assert other["nll"] == pytest.approx(expected.nll, rel=1e-6)
    moved = others.rename(tmp_path / "moved")
    assert evaluate_run(run, "test", data=moved) == other
    assert evaluations == ["test", "test"]
    # Each data's test split is met once.
    train(run.config, run.folder, resume=True, progress=False)
    with pytest.raises(ValueError, match=rf"has met step 4 of run .* delete .*{name}\.json"):
        evaluate_run(run, "test", data=moved)
    assert evaluate_run(run, "dev", data=moved)["step"] == 12
    assert main(["evaluate", str(run.folder), "--data", str(moved)]) == 0
    assert f"on {moved} (not the run's: its manifest hashes to {name[5:]}..)" in capsys.readouterr().out
    assert main(["evaluate", str(run.folder), "--data", str(shutil.copytree(sums, tmp_path / "copy"))]) == 0
    assert "copy (the run's own)" in capsys.readouterr().out


def test_whether_a_run_of_epochs_is_finished_needs_its_data(tiny: Make, tmp_path: Path, sums: Path) -> None:
    data, others = shutil.copytree(sums, tmp_path / "data"), prepare_sums(tmp_path / "others", seed=9)
    run = Run(train(tiny(data=data, epochs=1), tmp_path / "run", progress=False).folder)
    assert evaluate_run(run, "dev", data=others)["finished"] is True
    shutil.rmtree(data)
    assert evaluate_run(run, "test", data=others)["finished"] is None


def test_other_data_that_does_not_fit(tiny: Make, tmp_path: Path, sums: Path) -> None:
    run = Run(train(tiny(steps=2), tmp_path / "run", progress=False).folder)
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question. " * 400)
    prepare("text", tmp_path / "a.txt", tmp_path / "gpt2", context=32, tokenizer="gpt2")
    with pytest.raises(
        ConfigError, match=r"gpt2 has tokenizer 'gpt2', but .* was trained with 'bytes'; .*--tokenizer bytes"
    ):
        evaluate_run(run, "dev", data=tmp_path / "gpt2")
    others = prepare_sums(tmp_path / "others", seed=9)
    shard = others / "dev-00000.tokens.npy"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    with pytest.raises(ValueError, match=r"dev-00000\.tokens\.npy"):
        evaluate_run(run, "dev", data=others)
    small = ["model.depth=2", "model.gated_width=96", "model.shared_width=32"]
    gau = Run(train(tiny(*small, preset="gau-mini-d4", steps=1), tmp_path / "gau", progress=False).folder)
    longer = prepare_sums(tmp_path / "longer", context=2 * CONTEXT)
    with pytest.raises(
        ValueError, match=f"{2 * CONTEXT} tokens in a row, but this gau model has a context of {CONTEXT}"
    ):
        evaluate_run(gau, "dev", data=longer)
    assert not (run.folder / "evaluation").exists()
    assert not (gau.folder / "evaluation").exists()


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

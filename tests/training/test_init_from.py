"""A run that begins with the weights of another one."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tangolm.cli import main
from tangolm.config import ConfigError
from tangolm.models import build_model, save_model
from tangolm.training import CheckpointError, Run, RunConfig, plan, run_config_from, train
from tests.training.sums import CONTEXT, TINY, prepare_sums, same_bits, weights

Make = Callable[..., RunConfig]


@pytest.fixture
def source(tiny: Make, tmp_path: Path) -> Run:
    return Run(train(tiny(steps=6, evaluate_every=3), tmp_path / "source", progress=False).folder)


@pytest.fixture(scope="session")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other sums of the same kind."""
    return prepare_sums(tmp_path_factory.mktemp("others") / "sums", seed=7)


def begin(place: Path, data: Path, *overrides: str, **fields: Any) -> RunConfig:
    return run_config_from(place, data, overrides, **{"batch_size": 4, "device": "cpu", "steps": 4, **fields})


def test_a_run_a_checkpoint_and_a_model_give_one_beginning(source: Run, others: Path, tmp_path: Path) -> None:
    save_model(source.load("best"), tmp_path / "model", "bytes")
    places = [source.folder, source.best(), tmp_path / "model"]
    configs = [begin(place, others) for place in places]
    assert len({config.run_id for config in configs}) == 1
    assert configs[0].init_from == str(source.best())  # which checkpoint it was stays on record
    assert configs[0].optimizer.peak_lr == 2e-3
    runs = [Run(train(config, tmp_path / f"run-{n}", progress=False).folder) for n, config in enumerate(configs)]
    assert same_bits(weights(runs[0].last()), weights(runs[1].last()))
    assert same_bits(weights(runs[0].last()), weights(runs[2].last()))
    fresh = Run(
        train(
            dataclasses.replace(configs[0], init_from=None, init_sha256=None), tmp_path / "fresh", progress=False
        ).folder
    )
    assert runs[0].metrics()[0]["loss"] < fresh.metrics()[0]["loss"] - 0.5


def test_the_beginning_has_the_weights_and_no_moments(source: Run, others: Path, tmp_path: Path) -> None:
    config = begin(source.folder, others, "optimizer.peak_lr=1e-30", "optimizer.weight_decay=0", steps=1)
    run = Run(train(config, tmp_path / "run", progress=False).folder)
    ours, theirs = run.load("last").state_dict(), source.load("best").state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert {float(tensor) for name, tensor in weights(run.last()).items() if name.endswith(".step")} == {1.0}


def test_resuming_needs_the_source_until_there_is_a_checkpoint(source: Run, others: Path, tmp_path: Path) -> None:
    config = begin(source.folder, others)
    straight = Run(train(config, tmp_path / "straight", progress=False).folder)
    run = Run.create(tmp_path / "run", config)
    moved = source.folder.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="is not a folder"):
        train(config, run.folder, resume=True, progress=False)
    with pytest.raises(ValueError, match="is not a folder"):
        plan(config, run.folder)
    there = dataclasses.replace(config, init_from=str(moved))  # the folder is no part of the identity
    train(there, run.folder, resume=True, stop_after=2, progress=False)
    shutil.rmtree(moved)
    assert plan(there, run.folder)["steps"] == 4
    train(there, run.folder, resume=True, progress=False)
    assert same_bits(weights(run.last()), weights(straight.last()))


def test_another_context_goes_where_no_weight_is_bound_to_it(source: Run, tmp_path: Path, tiny: Make) -> None:
    longer = prepare_sums(tmp_path / "longer", context=2 * CONTEXT)
    config = begin(source.folder, longer)
    assert config.model.context == 2 * CONTEXT
    assert train(config, tmp_path / "run", progress=False).ended == "finished"
    small = ["model.depth=2", "model.gated_width=96", "model.shared_width=32"]
    gau = Run(train(tiny(*small, preset="gau-mini-d4", steps=1), tmp_path / "gau", progress=False).folder)
    config = begin(gau.folder, longer)
    said = rf"bound to a context of {CONTEXT}: \S+distance_bias is \[191\] here and \[95\] there"
    with pytest.raises(ConfigError, match=said):
        plan(config)
    with pytest.raises(ConfigError, match=said):
        train(config, tmp_path / "refused", progress=False)
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize(
    ("preset", "overrides", "said"),
    [
        ("tango-mini-d4", (), r"model\.depth is 4 here and 2 there"),
        ("loop-mini-d4", (), "model.architecture is .*transformer.* here and .*tango.* there"),
        ("tango-mini-d4", (*TINY, "model.width=96"), r"model\.width is 96 here and 64 there"),
        ("tango-mini-d4", (*TINY, "model.vocab_size=300"), r"model\.vocab_size is 300 here and 257 there"),
        (None, ("tokenizer=words",), "tokenizer is 'words' here and 'bytes' there"),
    ],
)
def test_another_model_is_refused_by_field(
    source: Run, others: Path, preset: str | None, overrides: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        begin(source.folder, others, *overrides, preset_name=preset)
    assert begin(source.folder, others, *TINY, preset_name="tango-mini-d4") == begin(source.folder, others)


def test_what_is_no_beginning_is_refused(source: Run, others: Path, tmp_path: Path, tiny: Make) -> None:
    with pytest.raises(ValueError, match="is not a folder; give a run, a checkpoint or a saved model"):
        begin(tmp_path / "missing", others)
    with pytest.raises(ValueError, match=r"holds no model\.safetensors"):
        begin(others, others)
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        begin(Run.create(tmp_path / "begun", tiny()).folder, others)
    config = begin(source.folder, others)
    path = source.best() / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"model\.safetensors does not match its sha256"):
        train(config, tmp_path / "run", progress=False)
    path.write_bytes(whole)
    save_model(build_model(config.model, seed=5), tmp_path / "model")
    with pytest.raises(ConfigError, match=r"the weights hash to .*\.\., init_sha256 is .*start another run"):
        train(dataclasses.replace(config, init_from=str(tmp_path / "model")), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_the_command(source: Run, others: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    words = ["train", "--init-from", source.folder, "--data", others, "--out", out, "--steps", 4, "--batch-size", 4]
    words += ["--set", "device=cpu", "--quiet"]
    assert main([*map(str, words), "--dry-run"]) == 0
    assert not out.exists()
    assert main([*map(str, words), "--stop-after", "2"]) == 0
    config = Run(out).config
    assert (config.init_from, config.model) == (str(source.best()), source.config.model)
    assert main(["train", "--resume", "--out", str(out), "--init-from", str(source.folder), "--stop-after", "1"]) == 0
    capsys.readouterr()
    train(source.config, tmp_path / "elsewhere", stop_after=1, progress=False)
    words = ["train", "--resume", "--out", out, "--init-from", tmp_path / "elsewhere" / "checkpoints" / "step-00000001"]
    assert main([*map(str, words)]) == 2
    assert "has another configuration: init_sha256 is" in capsys.readouterr().err

"""Mistakes of a user: one line that names them and the remedy, exit code 2, no traceback."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tangolm import data
from tangolm.cli import main


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("to be or not to be, that is the question. " * 200)
    data.prepare("text", folder / "a.txt", folder / "data", context=32)
    return folder / "data"


@pytest.fixture
def half_written(prepared: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "half"
    folder.mkdir()
    for shard in prepared.glob("*.npy"):
        (folder / shard.name).write_bytes(shard.read_bytes())
    return folder


@pytest.fixture
def damaged(prepared: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "damaged"
    folder.mkdir()
    for file in prepared.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    shard = folder / "train-00000.tokens.npy"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    return folder


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The error line of a command that must be refused."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert code == 2, f"exit code {code}, stdout {out!r}, stderr {err!r}"
    assert "Traceback" not in out + err
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1, err
    assert lines[0].startswith("tangolm: error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], r"command 'trian' is not known; did you mean 'train'"),
        (["count", "tnago-70m-d4"], "did you mean 'tango-70m-d4'"),
        (["count", "tango-70m-d4", "--context", "0"], "context must be at least 1, got 0"),
        (["count", "tango-70m-d4", "--context", "many"], "--context.*integer"),
        (["count", "tango-70m-d4", "--batch-size", "0"], "batch_size must be at least 1"),
        (["count", "tango-mini-d4", "--context", "99999999999999999999"], "context must be at most"),
        (["count", "tango-mini-d4", "--vocab-size", "2147483647", "--context", "2147483647"], "take smaller ones"),
        (["count", "nope"], "'nope' is not known; .tangolm presets. lists all"),
        (["prepare", "text", "--source", ".", "--out", "x", "--context", "99999999999"], "context must be at most"),
        (["count"], "PRESET"),
        (["count", "tango-mini-d4", "--no-such-option"], "--no-such-option"),
        (["prepare", "dm-math", "--out", "x"], "dataset 'dm-math' is not known; did you mean 'dm-mathematics'"),
        (["prepare", "text", "--out", "x"], "source is missing.*--source PATH"),
        (["prepare", "text", "--source", "no-such-file", "--out", "x"], "'no-such-file' does not exist"),
        (["prepare", "dm-mathematics", "--out", "x", "--context", "5"], "context must be at least .* got 5"),
        (["prepare", "dm-mathematics", "--out", "x", "--modules", "algebra__linear_9d"], "algebra__linear_9d"),
        (["prepare", "text", "--source", ".", "--out", "x", "--dev-fraction", "0.9"], "dev_fraction .* got 0.9"),
        (["train", "--out", "x"], "--preset is missing"),
        (["train", "--out", "x", "--preset", "tango-mini-d4"], "--data is missing"),
        (["train", "--out", "x", "--preset", "tango-mini-d4", "--data", "no-such-folder"], "no-such-folder"),
        (["train", "--out", "no-such-run", "--resume"], "run no-such-run does not exist"),
        (["evaluate", "no-such-run"], "no-such-run does not exist"),
        (["evaluate", ".", "--split", "tset"], "tset"),
        (["generate", "no-such-model", "--prompt", "x"], "no-such-model is not a folder"),
        (["report", "no-such-run", "--out", "x.html"], "no-such-run"),
    ],
)
def test_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, *arguments)
    assert re.search(message, line), line
    assert not list(tmp_path.iterdir()), "a refused command left something behind"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "tango-mini-d5"], "did you mean"),
        (["--set", "optimizer.peak_rl=1"], "unknown key 'optimizer.peak_rl'; did you mean 'peak_lr'"),
        (["--set", "optimizer.peak_lr=-1"], "peak_lr must be"),
        (["--set", "model.depth=0"], "depth must be at least 1, got 0"),
        (["--set", "model.vocab_size=13"], "model.vocab_size is 13 but the data"),
        (["--set", "steps"], "has no '='"),
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--steps", "5", "--tokens", "5"], "exactly one of steps, tokens and epochs"),
        (["--set", "device=cuda"], "device 'cuda' is not available here"),
        (["--set", "device=tpu"], "device must be one of"),
        (["--set", "impl=triton9"], "impl 'triton9'"),
        (["--stop-after", "0"], "stop_after must be at least 1"),
        (["--stop-after", "0", "--dry-run"], "stop_after must be at least 1"),
        (["--epochs", "1e300", "--dry-run"], "epochs must be above 0 and at most"),
        (["--steps", "99999999999999999999", "--dry-run"], "steps must be at most"),
    ],
)
def test_bad_training(
    capsys: pytest.CaptureFixture[str], prepared: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    base = ["train", "--data", prepared, "--out", tmp_path / "run", "--quiet"]
    if "--preset" not in arguments:
        base += ["--preset", "tango-mini-d4"]
    line = refused(capsys, *base, *arguments)
    assert re.search(message, line), line
    assert not (tmp_path / "run").exists()


@pytest.mark.case(29)
def test_data_that_is_not_whole(
    capsys: pytest.CaptureFixture[str], half_written: Path, damaged: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder, message in ((empty, "empty"), (half_written, "half"), (damaged, "train-00000")):
        line = refused(capsys, "train", "--preset", "tango-mini-d4", "--data", folder, "--out", tmp_path / "run")
        assert re.search(message, line), line


def test_prepared_folders_are_not_overwritten(
    capsys: pytest.CaptureFixture[str], prepared: Path, tmp_path: Path
) -> None:
    source = prepared.parent / "a.txt"
    assert "overwrite" in refused(capsys, "prepare", "text", "--source", source, "--out", prepared)
    (tmp_path / "letters.txt").write_text("mine")
    refused(capsys, "prepare", "text", "--source", source, "--out", tmp_path)
    assert (tmp_path / "letters.txt").read_text() == "mine"


def test_runs_are_not_overwritten(capsys: pytest.CaptureFixture[str], prepared: Path, tmp_path: Path) -> None:
    small = ["--set", "model.depth=1", "--set", "model.gated_width=16", "--steps", "2", "--quiet"]
    train = ["train", "--preset", "loop-mini-d4", "--data", str(prepared), "--out", str(tmp_path / "run"), *small]
    assert main(train) == 0
    assert "--resume" in refused(capsys, *train)
    line = refused(capsys, *train, "--resume", "--set", "optimizer.clip=2.0")
    assert "optimizer.clip is 2.0 here and 1.0 there" in line
    assert main([*train, "--resume"]) == 0
    assert main(["train", "--resume", "--out", str(tmp_path / "run"), "--quiet"]) == 0
    line = refused(capsys, "generate", tmp_path / "run", "--prompt", "")
    assert "empty" in line
    line = refused(capsys, "generate", tmp_path / "run", "--prompt", "to", "--temperature", "-1")
    assert "temperature" in line
    line = refused(capsys, "generate", tmp_path / "run", "--prompt", "to", "--beams", "3", "--temperature", "1")
    assert "beams 3" in line
    assert "seed must be" in refused(capsys, "generate", tmp_path / "run", "--prompt", "to", "--seed", "-1")
    assert "is not a folder" in refused(capsys, "generate", tmp_path / "run" / "config.json", "--prompt", "to")
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    assert "nope" in refused(capsys, "evaluate", tmp_path / "run", "--data", tmp_path / "nope")
    line = refused(capsys, "evaluate", tmp_path / "run", "--split", "test", "--answers", "--data", prepared)
    assert "does not go with --answers" in line
    assert "must be a file" in refused(capsys, "report", tmp_path / "run", "--out", tmp_path)


@pytest.mark.parametrize("name", ["trainer.json", "model.safetensors"])
def test_damaged_checkpoints_are_named(
    capsys: pytest.CaptureFixture[str], prepared: Path, tmp_path: Path, name: str
) -> None:
    run = tmp_path / "run"
    small = ["--set", "model.depth=1", "--set", "model.gated_width=16", "--steps", "2", "--quiet"]
    assert main(["train", "--preset", "loop-mini-d4", "--data", str(prepared), "--out", str(run), *small]) == 0
    for file in run.glob(f"checkpoints/*/{name}"):
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
    for command in (["evaluate", run], ["generate", run, "--prompt", "to"], ["train", "--resume", "--out", run]):
        assert name in refused(capsys, *command)


def test_json_alone_on_stdout(capsys: pytest.CaptureFixture[str], prepared: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    small = ["--set", "model.depth=1", "--set", "model.gated_width=16", "--steps", "2"]
    train = ["train", "--preset", "tango-mini-d4", "--data", str(prepared), "--out", str(run), *small, "--json"]
    commands = (
        ["count", "tango-mini-d4", "--json"],
        ["presets", "--json"],
        [*train, "--dry-run"],
        train,
        ["evaluate", str(run), "--json"],
        ["evaluate", str(run), "--split", "test", "--json"],
        ["generate", str(run), "--prompt", "to be", "--max-new-tokens", "5", "--json"],
    )
    results = []
    for command in commands:
        capsys.readouterr()
        assert main(command) == 0, command
        results.append(json.loads(capsys.readouterr().out))
    count, _, dry, _, dev, test, text = results
    assert {"non_embedding", "total", "macs", "useful_macs", "training_memory_bytes"} <= count.keys()
    assert count["non_embedding"] == 401_538
    assert dry["steps"] == 2
    assert dev["nll"] == pytest.approx(dev["nll_sum"] / dev["tokens"])
    assert test["split"] == "test"
    assert len(text["tokens"]) <= 5

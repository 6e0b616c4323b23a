"""Checkpoints: whole or absent, verified, exact."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tangolm.config import to_dict
from tangolm.models import LanguageModel, build_model
from tangolm.training import CheckpointError, Run, RunConfig, checkpoint, train
from tangolm.training.checkpoint import State
from tangolm.training.optim import build_optimizer
from tests.training.sums import same_bits, weights

Make = Callable[..., RunConfig]


def state_of(config: RunConfig, step: int) -> State:
    return State(
        step=step,
        samples=4 * step,
        tokens=99,
        best_step=step,
        best_nll=1.25,
        run_id=config.run_id,
        run=to_dict(config),
    )


def trained(config: RunConfig, seed: int) -> tuple[LanguageModel, torch.optim.AdamW]:
    model = build_model(config.model, seed, config.impl)
    optimizer = build_optimizer(model, config.optimizer)
    tokens = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(seed))
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    return model, optimizer


def test_saved_state_comes_back_to_the_bit(tiny: Make, tmp_path: Path) -> None:
    config = tiny()
    folder = checkpoint.save(tmp_path, *trained(config, 1), state_of(config, 7), "bytes")
    assert folder.name == "step-00000007"
    model, optimizer = trained(config, 2)
    state = checkpoint.restore(folder, model, optimizer)
    assert state == state_of(config, 7)
    again = checkpoint.save(tmp_path / "again", model, optimizer, state, "bytes")
    assert same_bits(weights(folder), weights(again))
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}  # no pickle


def test_step_0_has_no_moments(tiny: Make, tmp_path: Path) -> None:
    config = tiny()
    model = build_model(config.model, 1, config.impl)
    folder = checkpoint.save(tmp_path, model, build_optimizer(model, config.optimizer), state_of(config, 0), "bytes")
    checkpoint.restore(folder, model, build_optimizer(model, config.optimizer))


def test_missing_foreign_and_renamed_are_refused_by_name(tiny: Make, tmp_path: Path) -> None:
    config = tiny()
    folder = checkpoint.save(tmp_path, *trained(config, 1), state_of(config, 7), "bytes")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"somebody else: notes\.txt"):
        checkpoint.verify(folder)
    (folder / "notes.txt").unlink()
    renamed = folder.rename(folder.with_name("step-00000009"))
    with pytest.raises(CheckpointError, match="must be named step-00000007"):
        checkpoint.verify(renamed)
    folder = renamed.rename(folder)
    (folder / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"not whole: optimizer\.safetensors is missing"):
        checkpoint.verify(folder)
    (folder / "trainer.json").unlink()
    with pytest.raises(CheckpointError, match=r"not whole: trainer\.json is missing"):
        checkpoint.verify(folder)
    assert checkpoint.newest(tmp_path) is None


def test_moments_of_another_model_are_refused(tiny: Make, tmp_path: Path) -> None:
    config, other = tiny(), tiny("model.gated_width=64")
    folder = checkpoint.save(tmp_path, *trained(config, 1), state_of(config, 7), "bytes")
    with pytest.raises(CheckpointError, match="does not fit this run"):
        checkpoint.restore(folder, *trained(other, 1))


@pytest.mark.case(28)
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "trainer.json"])
def test_full_disk_leaves_nothing_that_looks_whole(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    straight = train(tiny(checkpoint_every=2), tmp_path / "straight", progress=False).folder
    run = Run(train(tiny(checkpoint_every=2), tmp_path / "run", stop_after=4, progress=False).folder)
    before = {path.name: path.read_bytes() for path in run.last().iterdir()}

    def full(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    if file == "trainer.json":
        monkeypatch.setattr(Path, "write_text", lambda path, text, **_: full(path, text.encode()))
    else:
        module = "tangolm.models.files" if file.startswith("model") else "tangolm.training.checkpoint"

        def save(tensors: dict[str, torch.Tensor], path: Path, **options: Any) -> None:
            save_file(tensors, path)
            full(path, path.read_bytes())

        monkeypatch.setattr(f"{module}.save_file", save)
    with pytest.raises(CheckpointError, match=r"No space left on device.*--resume"):
        train(run.config, run.folder, resume=True, progress=False)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000004"]
    assert {path.name: path.read_bytes() for path in run.last().iterdir()} == before
    monkeypatch.undo()
    assert train(run.config, run.folder, resume=True, progress=False).ended == "finished"
    assert same_bits(weights(run.last()), weights(Run(straight).last()))


KILLED = textwrap.dedent(
    """
    import os, signal, sys, torch
    from pathlib import Path
    from tangolm.training import Run, checkpoint, train
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).step()  # imports much; once for all children
    points = {
        "model written": (checkpoint, "_optimizer_tensors"),
        "optimizer half written": (checkpoint, "save_file"),
        "before the rename": (os, "rename"),
        "after the rename": (checkpoint, "rotate"),
        "while removing": (checkpoint.shutil, "rmtree"),
    }
    def die(*arguments, **_):
        if len(arguments) > 1 and str(arguments[1]).endswith("optimizer.safetensors"):
            Path(arguments[1]).write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    for folder, (module, name) in zip(sys.argv[1:], points.values(), strict=True):
        child = os.fork()  # one import of torch for all
        if child == 0:
            run = Run(folder)
            steps = 0
            step = checkpoint.save
            def save(*arguments):
                early = name not in ("rotate", "rmtree")
                if early:
                    setattr(module, name, die)
                saved = step(*arguments)
                setattr(module, name, die)
                return saved
            checkpoint.save = save
            train(run.config, folder, resume=True, progress=False)
            os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
)


@pytest.mark.case(28)
def test_killed_in_the_middle_of_a_save(tiny: Make, tmp_path: Path) -> None:
    config = tiny(checkpoint_every=4, evaluate_every=12)
    straight = Run(train(config, tmp_path / "straight", progress=False).folder)
    first = train(config, tmp_path / "first", stop_after=4, progress=False).folder
    folders = [shutil.copytree(first, tmp_path / f"killed-{number}") for number in range(5)]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *map(str, folders)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.split() == ["-9"] * 5, done.stderr
    left = []
    for folder in folders:
        run = Run(folder)
        whole = checkpoint.checkpoints(run.checkpoints)
        left.append([path.name for path in whole])
        for path in whole:
            checkpoint.verify(path)
        assert train(config, folder, resume=True, progress=False).ended == "finished"
        assert same_bits(weights(run.last()), weights(straight.last()))
        assert [record["step"] for record in run.metrics() if record["kind"] == "train"] == list(range(1, 13))
        assert not [path for path in run.checkpoints.iterdir() if path.name.startswith(".")]
    new = [any(name > "step-00000004" for name in names) for names in left]
    assert new == [False, False, False, True, True], left


def test_resume_passes_over_a_damaged_checkpoint(
    tiny: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(evaluate_every=4, checkpoint_every=2)
    straight = Run(train(config, tmp_path / "straight", progress=False).folder)
    run = Run(train(config, tmp_path / "run", stop_after=6, progress=False).folder)
    assert [path.name for path in checkpoint.checkpoints(run.checkpoints)] == ["step-00000004", "step-00000006"]
    damaged = run.last() / "model.safetensors"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    result = train(config, run.folder, resume=True)
    shown = capsys.readouterr().err
    assert "passed over: checkpoint" in shown
    assert "model.safetensors does not match its sha256" in shown
    assert "going on from step-00000004" in shown
    assert result.ended == "finished"
    assert same_bits(weights(run.last()), weights(straight.last()))


def test_resume_without_a_whole_checkpoint_is_refused(tiny: Make, tmp_path: Path) -> None:
    config = tiny(checkpoint_every=2)
    run = Run(train(config, tmp_path / "run", stop_after=4, progress=False).folder)
    damaged = run.last() / "trainer.json"
    damaged.write_text(damaged.read_text() + " ")
    with pytest.raises(CheckpointError, match=r"no whole checkpoint is left: .*trainer\.json does not match its seal"):
        train(config, run.folder, resume=True, progress=False)


def test_a_damaged_last_checkpoint_is_told(tiny: Make, tmp_path: Path) -> None:
    config = tiny(evaluate_every=4, checkpoint_every=2)
    run = Run(train(config, tmp_path / "run", stop_after=6, progress=False).folder)
    damaged = run.last() / "trainer.json"
    damaged.write_text(damaged.read_text() + " ")
    for which in (run.last, run.best):
        with pytest.warns(UserWarning, match=r"step-00000006 of run .* is damaged; step-00000004 is taken"):
            which()


def test_a_lost_best_checkpoint_is_told(tiny: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny(evaluate_every=4, checkpoint_every=2)
    run = Run(train(config, tmp_path / "run", stop_after=6, progress=False).folder)
    shutil.rmtree(run.best())
    train(config, run.folder, resume=True, stop_after=1)
    assert "the best checkpoint so far is lost: checkpoint" in capsys.readouterr().err

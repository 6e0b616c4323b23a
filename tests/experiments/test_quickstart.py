"""A tiny quickstart: two modules, a few steps of small models. Whatever is done is not done again."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tangolm.experiments import quickstart
from tangolm.experiments.quickstart import FULL, SMALL, QuickstartResult, Size
from tangolm.models import preset_names
from tangolm.training import Run

TINY = Size(
    train_per_source=8,
    dev_per_module=3,
    test_per_module=3,
    tokens=6 * 2 * 256,
    batch_size=2,
    modules=("arithmetic__add_or_sub", "comparison__pair"),
    overrides=("model.depth=1", "model.gated_width=64", "device=cpu", "evaluate_every=3"),
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[QuickstartResult, list[tuple[int, int, str]]]:
    """Three calls: the first two are interrupted in training (in the first model, then in the second)."""
    folder = tmp_path_factory.mktemp("quickstart") / "out"
    told: list[tuple[int, int, str]] = []
    first = quickstart.run(folder, size=TINY, stop_after=4)
    assert first.message is not None
    assert "step 4 of 6 of tango-mini-d4" in first.message
    assert f"tangolm quickstart --out {folder}" in first.message
    assert [place.name for place in first.runs] == ["tango-mini-d4"]
    second = quickstart.run(folder, size=TINY, stop_after=4)
    assert second.message is not None
    assert "step 4 of 6 of loop-mini-d4" in second.message
    result = quickstart.run(folder, size=TINY, progress=lambda *item: told.append(item))
    return result, told


def files(folder: Path) -> dict[str, str]:
    found = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert found
    return found


def test_it_ends_with_two_judged_runs(finished: tuple[QuickstartResult, list[tuple[int, int, str]]]) -> None:
    result, told = finished
    assert result.message is None
    assert result.exit_code == 0
    assert [place.name for place in result.runs] == ["tango-mini-d4", "loop-mini-d4"]
    for place in result.runs:
        run = Run(place)
        updates = [record for record in run.metrics() if record["kind"] == "train"]
        assert [record["step"] for record in updates] == [1, 2, 3, 4, 5, 6]
        assert sum(record["tokens"] for record in updates) == TINY.tokens
        test, answers = run.evaluation("test"), run.evaluation("answers")
        assert test is not None
        assert answers is not None
        assert answers["step"] == test["step"]
        assert answers["questions"] == 6
        assert set(answers["modules"]) == set(TINY.modules)
        assert answers["origin"] == "generated"
        assert answers["samples"]
        assert None not in (answers["untrained"], answers["commonest"])
    assert {what for _, _, what in told} >= {"loop-mini-d4: answering", "tango-mini-d4: untrained baseline"}


def test_both_models_saw_the_same_samples(finished: tuple[QuickstartResult, list[tuple[int, int, str]]]) -> None:
    result, _ = finished
    seen = []
    for place in result.runs:
        updates = [record for record in Run(place).metrics() if record["kind"] == "train"]
        seen.append([(record["samples"], record["supervised_tokens"]) for record in updates])
    assert seen[0] == seen[1]
    one, other = (Run(place).config for place in result.runs)
    assert (one.data_sha256, one.data_seed, one.batch_size) == (other.data_sha256, other.data_seed, other.batch_size)
    with pytest.raises(AssertionError, match="different batches"):
        quickstart._check_same_batches([one, replace(other, data_seed=102)])


def test_again_it_only_shows(finished: tuple[QuickstartResult, list[tuple[int, int, str]]]) -> None:
    result, _ = finished
    before = files(result.folder)
    again = quickstart.run(result.folder, size=TINY)
    assert not again.trained
    assert again.runs == result.runs
    assert files(result.folder) == before


def test_an_interruption_changes_nothing(
    finished: tuple[QuickstartResult, list[tuple[int, int, str]]], tmp_path: Path
) -> None:
    result, _ = finished
    shutil.copytree(result.data, tmp_path / "data")
    straight = quickstart.run(tmp_path, size=TINY)
    for one, other in zip(result.runs, straight.runs, strict=True):
        for split in ("test", "answers"):
            ours, theirs = ({**(Run(run).evaluation(split) or {}), "data": None} for run in (one, other))
            assert ours == theirs


def test_other_folders_are_refused(
    finished: tuple[QuickstartResult, list[tuple[int, int, str]]], tmp_path: Path
) -> None:
    result, _ = finished
    with pytest.raises(ValueError, match="another size"):
        quickstart.run(result.folder, size=replace(TINY, train_per_source=9))
    with pytest.raises(ValueError, match=r"another configuration: .*batch_size"):
        quickstart.run(result.folder, size=replace(TINY, batch_size=4))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "letter.txt").write_text("Dear")
    with pytest.raises(ValueError, match=r"letter\.txt"):
        quickstart.run(tmp_path, size=TINY)


def test_a_damaged_result_is_named(
    finished: tuple[QuickstartResult, list[tuple[int, int, str]]], tmp_path: Path
) -> None:
    result, _ = finished
    shutil.copytree(result.folder, tmp_path / "copy")
    kept = tmp_path / "copy" / "runs" / "loop-mini-d4" / "evaluation" / "answers.json"
    whole = json.loads(kept.read_text())
    kept.write_text("{")
    with pytest.raises(ValueError, match=r"answers\.json is damaged"):
        quickstart.run(tmp_path / "copy", size=TINY)
    kept.unlink()
    quickstart.run(tmp_path / "copy", size=TINY)
    assert json.loads(kept.read_text()) == whole


def test_the_sizes_are_within_the_budget() -> None:
    for size in (FULL, SMALL):
        assert size.tokens <= 800_000
        assert set(size.presets) <= set(preset_names())
        assert not size.modules  # all of them


@pytest.mark.slow
def test_it_learns(tmp_path: Path) -> None:
    """The small one on fewer modules, with one model."""
    size = replace(SMALL, presets=("tango-mini-d4",), modules=TINY.modules, tokens=40_960)
    [place] = quickstart.run(tmp_path, size=size).runs
    evaluations = [record["nll"] for record in Run(place).metrics() if record["kind"] == "evaluation"]
    assert min(evaluations) < 3.2  # ln 257 = 5.55 untrained; characters' frequencies alone give about 3

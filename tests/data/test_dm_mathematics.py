from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tangolm.data import dm_generate, dm_shim, open_split, prepare, questions
from tangolm.data.dm_generate import RECORDED
from tangolm.data.dm_shim import Example
from tests.data.tiny import contents, documents

MODULES = ("algebra__linear_2d_composed", "numbers__gcd", "polynomials__add", "probability__swr_p_level_set")
SMALL: dict[str, Any] = {
    "modules": list(MODULES),
    "train_per_source": 5,
    "dev_per_module": 4,
    "test_per_module": 3,
    "workers": 1,
}
PROGRAM = """
import json, sys
from tangolm.data import prepare

if __name__ == "__main__":
    prepare("dm-mathematics", None, sys.argv[1], **json.loads(sys.argv[2]))
"""


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dm_generate, "golden_digest", lambda: RECORDED["sha256"])


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, recorded: None) -> None:
    """Questions that say what they are, instead of drawn ones."""
    monkeypatch.setattr(
        dm_shim, "example", lambda seed, *name: Example(" ".join(map(str, name)), str(name[-1] % 3), 1, 0)
    )


def test_fresh_processes_draw_the_same_bytes_whatever_hash_seed_and_workers(tmp_path: Path) -> None:
    running = []
    (tmp_path / "program.py").write_text(PROGRAM)
    for hash_seed, workers in (("0", 1), ("1", 2)):
        command = [
            sys.executable,
            str(tmp_path / "program.py"),
            str(tmp_path / hash_seed),
            json.dumps(SMALL | {"workers": workers}),
        ]
        running.append(subprocess.Popen(command, env=os.environ | {"PYTHONHASHSEED": hash_seed}))
    assert [process.wait() for process in running] == [0, 0]
    first, second = contents(tmp_path / "0"), contents(tmp_path / "1")
    assert first == second
    assert len(first) == 7  # tokens and marks of three splits, and the manifest


def test_what_a_preparation_holds(tmp_path: Path, recorded: None) -> None:
    manifest = prepare("dm-mathematics", None, tmp_path, **SMALL)
    assert manifest["generated"] is True
    assert manifest["origin"] == "generated"
    assert manifest["stream"] == "as recorded"
    assert (manifest["context"], manifest["vocab_size"], manifest["document_masking"]) == (256, 257, True)
    assert manifest["arguments"]["train_per_source"] == 5
    assert "workers" not in manifest["arguments"]
    assert manifest["versions"]["sympy"] == version("sympy")
    assert manifest["versions"]["mathematics_dataset"] == version("mathematics_dataset")
    assert str(tmp_path) not in json.dumps(manifest)
    names = [f"{module}-{level}" for module in MODULES for level in ("easy", "hard", "medium")]
    train = manifest["splits"]["train"]
    assert [(s["name"], s["documents"], s["rows"]) for s in train["sources"]] == [(name, 5, None) for name in names]
    assert len({source["digest"] for source in train["sources"]}) == len(names)
    assert sorted(manifest["modules"]) == sorted(MODULES)
    for split, count in (("dev", 4), ("test", 3)):
        opened = open_split(tmp_path, split)
        opened.verify()
        found = questions(opened)
        assert [question.module for question in found] == [module for module in MODULES for _ in range(count)]
        for question in found:
            assert question.prompt_ids[-1] == ord("\n")
            assert question.prompt_ids.count(ord("\n")) == 1
            assert ord("\n") not in question.answer_ids
            assert question.answer_ids
        assert [source["name"] for source in opened.manifest["splits"][split]["sources"]] == list(MODULES)
    with dm_shim.generators_kept():
        expected = dm_shim.example(0, "test", "numbers__gcd", "interpolate", 2)
    found = [question for question in questions(open_split(tmp_path, "test")) if question.module == "numbers__gcd"]
    assert bytes(found[2].prompt_ids).decode() == expected[0] + "\n"
    assert bytes(found[2].answer_ids).decode() == expected[1]


def test_sources_are_mixed_in_rounds_of_one_question_each(tmp_path: Path, fake: None) -> None:
    manifest = prepare("dm-mathematics", None, tmp_path, **SMALL)
    found = [prompt.decode().split() for prompt, _ in documents(open_split(tmp_path, "train"))]
    assert len(found) == 12 * 5
    orders = []
    for number in range(5):
        part = found[12 * number : 12 * number + 12]
        assert {int(index) for *_, index in part} == {number}
        orders.append([(module, level) for _, module, level, _ in part])
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len(set(map(tuple, orders))) == 5
    dev = [prompt.decode().split() for prompt, _ in documents(open_split(tmp_path, "dev"))]
    assert [level for _, module, level, _ in dev if module == "numbers__gcd"] == ["easy", "easy", "medium", "hard"]
    assert manifest["modules"]["numbers__gcd"] == {"commonest_answer": "0"}  # 0 and 1 are as common; the first in order
    assert manifest["passed_over"]["too_long"] == 12 * 5 + 4 * 4 + 4 * 3


def test_no_held_out_question_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: None) -> None:
    # Ten questions in all: development and test take some, training must do with the others.
    monkeypatch.setattr(
        dm_shim, "example", lambda seed, split, module, level, index: Example(f"{module} {(7 * index) % 10}", "1", 0, 0)
    )
    small = SMALL | {"dev_per_module": 1, "test_per_module": 2}
    manifest = prepare("dm-mathematics", None, tmp_path / "a", **small)
    prompts = {
        split: {p for p, _ in documents(open_split(tmp_path / "a", split))} for split in ("train", "dev", "test")
    }
    assert not prompts["train"] & (prompts["dev"] | prompts["test"])
    assert not prompts["dev"] & prompts["test"]
    assert {len(prompts[split]) for split in ("dev", "test")} == {4, 8}
    assert {source["documents"] for source in manifest["splits"]["train"]["sources"]} == {5}
    assert manifest["passed_over"]["in_dev_or_test"] >= 3 * 12
    assert manifest["passed_over"]["in_test"] >= 2 * 4
    # With every question held out nothing is left to train on: said, not looked for without end.
    with pytest.raises(ValueError, match=r"has too few different questions"):
        prepare("dm-mathematics", None, tmp_path / "b", **small | {"test_per_module": 10})


@pytest.mark.case(35)
def test_another_stream_of_random_numbers_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = SMALL | {"modules": ["algebra__linear_1d"]}
    plain = prepare("dm-mathematics", None, tmp_path / "a", **small)
    assert plain["stream"] == "as recorded"
    seed = np.random.seed
    monkeypatch.setattr(np.random, "seed", lambda key: seed(key + 1))
    with pytest.warns(UserWarning, match="stream of generated questions differs"):
        other = prepare("dm-mathematics", None, tmp_path / "b", **small)
    assert other["stream"] == f"differs from the one recorded with sympy {RECORDED['sympy']}, numpy {RECORDED['numpy']}"
    digests = [{s["name"]: s["digest"] for s in m["splits"]["train"]["sources"]} for m in (plain, other)]
    assert digests[0].keys() == digests[1].keys()
    assert all(digests[0][name] != digests[1][name] for name in digests[0])


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"context": 191}, "context must be at least 192, got 191"),
    ({"train_per_source": 0}, "train_per_source must be at least 1, got 0"),
    ({"dev_per_module": -1}, "dev_per_module must be at least 1"),
    ({"test_per_module": "many"}, "test_per_module must be int"),
    ({"workers": 0}, "workers must be at least 1"),
    ({"seed": -1}, "seed must be 0 to"),
    ({"seed": 2**32}, "seed must be 0 to"),
    ({"modules": ["algebra__linear"]}, "no module of mathematics; did you mean 'algebra__linear_"),
    ({"modules": "algebra__linear_1d"}, "modules must be a list"),
    ({"questions": 5}, "unknown key 'questions'"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_options_are_refused_by_name(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        prepare("dm-mathematics", None, tmp_path / "out", **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_an_interrupted_preparation_is_started_over(tmp_path: Path, fake: None) -> None:
    def interrupt(done: int, total: int, text: str) -> None:
        if done > 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare("dm-mathematics", None, tmp_path / "a", progress=interrupt, **SMALL)
    with pytest.raises(ValueError, match="is half-written"):
        open_split(tmp_path / "a", "train")
    prepare("dm-mathematics", None, tmp_path / "a", **SMALL)
    prepare("dm-mathematics", None, tmp_path / "b", **SMALL)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_progress_counts_the_questions(tmp_path: Path, fake: None) -> None:
    seen: list[tuple[int, int, str]] = []
    prepare("dm-mathematics", None, tmp_path, progress=lambda *report: seen.append(report), **SMALL)
    drawn = [(done, total) for done, total, text in seen if text == "generating questions"]
    assert drawn == sorted(drawn)
    assert drawn[-1] == (60 + 16 + 12, 60 + 16 + 12)
    assert "packing train" in {text for _, _, text in seen}
    assert seen[-1][0] == seen[-1][1]


@pytest.mark.slow
def test_a_full_set_of_modules(tmp_path: Path) -> None:
    manifest = prepare("dm-mathematics", None, tmp_path, train_per_source=4, dev_per_module=3, test_per_module=3)
    assert len(manifest["splits"]["train"]["sources"]) == 168
    assert len(manifest["modules"]) == 56
    assert manifest["splits"]["train"]["documents"] == 168 * 4

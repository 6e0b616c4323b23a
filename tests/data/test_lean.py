from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tangolm.data import open_split, prepare, questions
from tests.data.test_text import stream, write
from tests.data.tiny import contents

SPLITS = ("train", "dev", "test")
FRACTIONS: dict[str, Any] = {"dev_fraction": 0.2, "test_fraction": 0.2, "workers": 1}


def library(root: Path, count: int = 30) -> dict[str, str]:
    """Small files of Lean, each with two theorems, a definition, and one of them in ten with a hole."""
    texts = {}
    for number in range(count):
        hole = f"theorem open{number} : {number} = 1 := by\n  sorry\n\n" if number % 10 == 0 else ""
        texts[f"Lib/Part{number % 3}/File{number:02d}.lean"] = (
            f"/-\ntheorem commented : p := h\n-/\nmodule\n\nnamespace N{number}\n\n"
            f"/-- The sum. -/\n@[simp] theorem sum{number} : {number} + 1 = {number + 1} := by\n  decide -- not sorry\n\n"
            f"def twice (n : ℕ) := {number} * n\n\n{hole}"
            f"lemma all{number} (n : ℕ) : n + {number} = {number} + n\n  | 0 => by simp\n  | n + 1 => by omega\n\nend N{number}\n"
        )
    write(root, {name: text.encode() for name, text in texts.items()})
    return texts


def proofs(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """(prompt, proof) of each document, by split."""
    return {
        split: [
            (bytes(one.prompt_ids).decode(), bytes(one.answer_ids).decode())
            for one in questions(open_split(folder, split))
        ]
        for split in SPLITS
    }


def records(folder: Path, *values: Any, name: str = "data.jsonl") -> Path:
    lines = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
    write(folder, {name: "".join(f"{line}\n" for line in lines).encode()})
    return folder


def test_proofs_are_supervised_and_their_statements_are_prompts(tmp_path: Path) -> None:
    texts = library(tmp_path / "in")
    manifest = prepare("lean", tmp_path / "in", tmp_path / "out", **FRACTIONS)
    found = proofs(tmp_path / "out")
    pairs = [pair for part in found.values() for pair in part]
    assert len(pairs) == 60
    assert (
        "/-- The sum. -/\n@[simp] theorem sum7 : 7 + 1 = 8 ",
        ":= by\n  decide",
    ) in pairs
    assert ("lemma all7 (n : ℕ) : n + 7 = 7 + n\n  ", "| 0 => by simp\n  | n + 1 => by omega") in pairs
    counts = manifest["passed_over"]
    assert (counts["theorem_lines"], counts["theorems"], counts["not_cut"], counts["sorry"]) == (63, 63, 0, 3)
    assert counts["theorem_lines_in_comments"] == 30
    assert manifest["document_masking"]
    supervised = sum(entry["supervised_tokens"] for entry in manifest["splits"].values())
    assert supervised == sum(len(proof.encode()) + 1 for _, proof in pairs)
    for split in SPLITS:  # the theorems of a file are in one split
        prompts = "".join(prompt for prompt, _ in found[split])
        assert all((f"sum{number} " in prompts) == (f"all{number} " in prompts) for number in range(len(texts)))


def test_source_keeps_whole_files_of_the_same_splits_but_those_with_holes(tmp_path: Path) -> None:
    texts = library(tmp_path / "in")
    manifest = prepare("lean", tmp_path / "in", tmp_path / "out", task="source", **FRACTIONS)
    read = {split: [text.decode() for text in stream(tmp_path / "out", split)] for split in SPLITS}
    assert sorted(text for part in read.values() for text in part) == sorted(
        text for text in texts.values() if "by\n  sorry" not in text
    )
    assert manifest["passed_over"]["sorry"] == 3
    assert not manifest["document_masking"]
    prepare("lean", tmp_path / "in", tmp_path / "proofs", **FRACTIONS)
    for split, pairs in proofs(tmp_path / "proofs").items():
        assert all(
            prompt in "".join(read[split]) for prompt, _ in pairs if not any(f" {n} +" in prompt for n in (0, 10, 20))
        )


def test_a_prompt_begins_with_what_stands_before_it(tmp_path: Path) -> None:
    library(tmp_path / "in")
    prepare("lean", tmp_path / "in", tmp_path / "out", before=40, **FRACTIONS)
    prompts = [prompt for part in proofs(tmp_path / "out").values() for prompt, _ in part]
    assert "\ndef twice (n : ℕ) := 7 * n\n\nlemma all7 (n : ℕ) : n + 7 = 7 + n\n  " in prompts
    prepare("lean", tmp_path / "in", tmp_path / "all", before=10_000, **FRACTIONS)
    prompts = [prompt for part in proofs(tmp_path / "all").values() for prompt, _ in part]
    assert sum(prompt.startswith("/-\ntheorem commented") for prompt in prompts) == 60


def test_long_prompts_lose_their_start_and_long_proofs_are_passed_over(tmp_path: Path) -> None:
    library(tmp_path / "in")
    write(tmp_path / "in", {"Long.lean": b"theorem long : p := by\n" + b"  simp\n" * 20})
    manifest = prepare("lean", tmp_path / "in", tmp_path / "out", before=500, context=64, **FRACTIONS)
    assert manifest["passed_over"]["too_long"] == 1
    assert manifest["passed_over"]["prompts_shortened"] == 60
    pairs = [pair for part in proofs(tmp_path / "out").values() for pair in part]
    assert len(pairs) == 60
    for prompt, proof in pairs:
        assert 60 <= len((prompt + proof).encode()) + 1 <= 64
        assert prompt.endswith(("= 1 ", *(f"= {n} " for n in range(40)), "+ n\n  "))


def test_another_tokenizer_fits_prompts_too(tmp_path: Path) -> None:
    library(tmp_path / "in")
    manifest = prepare("lean", tmp_path / "in", tmp_path / "out", before=500, context=48, tokenizer="gpt2", **FRACTIONS)
    assert manifest["passed_over"]["prompts_shortened"] == 60
    assert sum(entry["documents"] for entry in manifest["splits"].values()) == 60


def test_what_could_not_be_cut_is_counted_and_named(tmp_path: Path) -> None:
    library(tmp_path / "in")
    write(
        tmp_path / "in",
        {
            "Odd.lean": b"-- one\ntheorem first : some claim\n\nlemma second :=\n\nend\n",
            "._Odd.lean": b"\x00\x05",
            ".lake/packages/a.lean": b"theorem a : p := h\n",
            "notes.txt": b"theorem a : p := h\n",
            "Empty.lean": b"\n",
            "Latin.lean": b"-- caf\xe9\ntheorem a : p := h\n",
        },
    )
    counts = prepare("lean", tmp_path / "in", tmp_path / "out", **FRACTIONS)["passed_over"]
    assert (counts["not_cut"], counts["empty"], counts["not_utf8"]) == (2, 1, 1)
    named = [name for name in counts if name.startswith("not_cut ")]
    assert named == ["not_cut Odd.lean:2 theorem first : some claim lemma", "not_cut Odd.lean:4 lemma second := end"]


def test_copies_links_and_large_files_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = library(tmp_path / "in")
    write(tmp_path / "in", {"Copy.lean": next(text for name, text in texts.items() if "File07" in name).encode()})
    write(tmp_path / "in", {"Large.lean": b"-- " + b"x" * 2000})
    (tmp_path / "in" / "Link.lean").symlink_to(tmp_path / "in" / "Copy.lean")
    monkeypatch.setattr("tangolm.data.lean.LARGEST", 1000)
    counts = prepare("lean", tmp_path / "in", tmp_path / "out", **FRACTIONS)["passed_over"]
    assert (counts["copies"], counts["links"], counts["too_large"]) == (2, 1, 1)


def test_two_preparations_are_equal_byte_for_byte(tmp_path: Path) -> None:
    library(tmp_path / "in")
    for task in ("proof", "source"):
        prepare("lean", tmp_path / "in", tmp_path / f"{task}1", task=task, **FRACTIONS)
        prepare("lean", tmp_path / "in", tmp_path / f"{task}2", task=task, **(FRACTIONS | {"workers": 2}))
        assert contents(tmp_path / f"{task}1") == contents(tmp_path / f"{task}2")


def declarations(count: int = 40) -> list[dict[str, Any]]:
    return [
        {
            "srcUpToDecl": f"import A\n\nvariable (n{number} : ℕ)\n\n",
            "decl": f"theorem t{number} : n{number} = n{number}",
            "declId": f"Lib.File{number // 4}.{number}_0.abc123",
            "proof": ":= by\n  rfl" if number % 8 else ":= sorry",
        }
        for number in range(count)
    ]


def test_statements_and_proofs_of_json_lines_are_taken_as_they_are(tmp_path: Path) -> None:
    records(tmp_path / "in", *declarations())
    manifest = prepare("lean", tmp_path / "in", tmp_path / "out", before=20, **FRACTIONS)
    found = proofs(tmp_path / "out")
    assert manifest["passed_over"]["sorry"] == 5
    pairs = {pair for part in found.values() for pair in part}
    # The last 20 bytes before a statement begin within a line, which is left out.
    assert pairs == {(f"\ntheorem t{n} : n{n} = n{n} ", ":= by\n  rfl") for n in range(40) if n % 8}
    for part in found.values():  # the file of `declId` decides, not the declaration
        files = [int(prompt.rpartition("theorem t")[2].split()[0]) // 4 for prompt, _ in part]
        assert all(files.count(file) == (3 if file % 2 == 0 else 4) for file in files)
    prepare("lean", tmp_path / "in", tmp_path / "source", task="source", **FRACTIONS)
    texts = [text.decode() for split in SPLITS for text in stream(tmp_path / "source", split)]
    assert sorted(texts) == sorted(f"theorem t{n} : n{n} = n{n} := by\n  rfl" for n in range(40) if n % 8)


@pytest.mark.parametrize("schema", ["fact", "full_proof"])
def test_declarations_of_json_lines_are_cut(tmp_path: Path, schema: str) -> None:
    values: list[dict[str, Any]] = [
        {schema: f"import A\n\ntheorem t{n} : {n} = {n} := by\n  rfl", "filename": f"F{n}"} for n in range(30)
    ]
    values += [{schema: f"bare{n} : {n} = {n} := rfl", "type": "lemma"} for n in range(30)]
    values += [{schema: "def f := 1", "type": "def"}, {schema: "theorem hole : p := by sorry"}]
    manifest = prepare("lean", records(tmp_path / "in", *values) / "data.jsonl", tmp_path / "out", **FRACTIONS)
    pairs = {pair for part in proofs(tmp_path / "out").values() for pair in part}
    assert pairs == {(f"theorem t{n} : {n} = {n} ", ":= by\n  rfl") for n in range(30)} | {
        (f"lemma bare{n} : {n} = {n} ", ":= rfl") for n in range(30)
    }
    assert (manifest["passed_over"]["sorry"], manifest["passed_over"]["theorems"]) == (1, 61)
    prepare("lean", tmp_path / "in", tmp_path / "source", task="source", **FRACTIONS)
    texts = [text.decode() for split in SPLITS for text in stream(tmp_path / "source", split)]
    assert len(texts) == 61
    assert "def f := 1" in texts


BAD_RECORDS: list[tuple[Any, str]] = [
    ("{", "line 2 is no JSON"),
    ({"text": "a"}, "line 2 has none of the fields 'decl' with 'proof', 'full_proof' and 'fact'; it has 'text'"),
    ({"decl": "theorem a : p", "proof": None}, "line 2: its field 'proof' is no text but null"),
    ({"decl": "theorem a : p", "proof": " "}, "line 2: its 'decl' or 'proof' is empty"),
    ({"fact": 3}, "line 2: its field 'fact' is no text but int"),
]


@pytest.mark.parametrize(("value", "message"), BAD_RECORDS)
def test_a_bad_line_is_named_or_skipped(tmp_path: Path, value: Any, message: str) -> None:
    first, *others = declarations()
    records(tmp_path / "in", first, value, *others)
    with pytest.raises(ValueError, match=message):
        prepare("lean", tmp_path / "in", tmp_path / "out", **FRACTIONS)
    manifest = prepare("lean", tmp_path / "in", tmp_path / "out", overwrite=True, on_error="skip", **FRACTIONS)
    assert manifest["passed_over"]["bad_lines"] == 1


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"task": "proofs"}, "task must be one of"),
    ({"context": 15}, "context must be at least 16, got 15"),
    ({"before": -1}, "before must be at least 0, got -1"),
    ({"task": "source", "before": 5}, "before is of the task 'proof'"),
    ({"tokenizer": "byte"}, "tokenizer 'byte' is not known"),
    ({"on_error": "stop"}, "on_error must be one of"),
    ({"dev_fraction": 0.5}, "dev_fraction must be above 0 and below 0.5"),
    ({"workers": 0}, "workers must be at least 1"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_options_are_refused_by_name(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    library(tmp_path / "in", 3)
    with pytest.raises(ValueError, match=message):
        prepare("lean", tmp_path / "in", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_source_without_lean_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "in", {"a.txt": b"text"})
    with pytest.raises(ValueError, match=r"holds no file of \.lean"):
        prepare("lean", tmp_path / "in", tmp_path / "out")
    with pytest.raises(ValueError, match=r"a\.txt' holds no file of \.lean"):
        prepare("lean", tmp_path / "in" / "a.txt", tmp_path / "out")
    library(tmp_path / "few", 1)
    with pytest.raises(ValueError, match="would be empty"):
        prepare("lean", tmp_path / "few", tmp_path / "out")

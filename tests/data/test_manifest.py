from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tangolm.data.manifest import MANIFEST, MARK, SPLITS, claim, read_manifest, replacing
from tangolm.data.pipeline import Document, Worked, write
from tangolm.data.text import TextOptions
from tangolm.data.tokenizer import get_tokenizer
from tests.data.tiny import contents, prepare_sums, save_tokenizer

WRONG: list[tuple[list[Any], Any, str]] = [
    (["format"], 2, "format must be 1, got 2"),
    (["context"], "16", "context must be int"),
    (["context"], 0, "context must be at least 1"),
    (["tokenizer"], "words", "tokenizer 'words' is not known"),
    (["vocab_size"], 258, "vocab_size must be 257"),
    (["end_token"], 0, "end_token must be 256"),
    (["document_masking"], 1, "document_masking must be bool"),
    (["splits"], [], "splits must be a mapping"),
    (["splits", "train", "rows"], "12", "splits.train.rows must be int"),
    (["splits", "train", "rows"], 11, "not the sum over its shards"),
    (["splits", "train", "shards", 0, "rows"], None, r"splits.train.shards\[0\].rows"),
    (["splits", "train", "shards", 0, "name"], "../../etc/passwd", "names the shard"),
    (["splits", "train", "shards", 0, "name"], "dev-00000", "names the shard"),
    (["splits", "train", "shards", 0, "sha256"], {}, "no checksums"),
    (["splits", "train", "sources", 0, "rows"], [0, 99], "gives 'small' the rows"),
    (["splits", "train", "sources", 0, "rows"], [3], "must have 2 items"),
    (["splits", "train", "unheard_of"], 1, "unknown key"),
    (["splits", "valid"], None, "valid"),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG)
def test_a_wrong_manifest_is_refused_by_name(tmp_path: Path, path: list[Any], value: Any, message: str) -> None:
    manifest = prepare_sums(tmp_path)
    node: Any = manifest
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=message) as caught:
        read_manifest(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("key", ["format", "dataset", "context", "tokenizer", "vocab_size", "end_token", "splits"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    manifest = prepare_sums(tmp_path)
    del manifest[key]
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=key):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "{", '{"format": 1', "[1]", "null", "\x00\x00"])
def test_a_damaged_manifest_is_refused(tmp_path: Path, text: str) -> None:
    prepare_sums(tmp_path)
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(ValueError, match="prepare the folder again"):
        read_manifest(tmp_path)


def test_missing_empty_half_written_and_foreign_folders_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_manifest(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file"):
        read_manifest(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is empty"):
        read_manifest(tmp_path / "empty")
    prepare_sums(tmp_path / "half")
    (tmp_path / "half" / MANIFEST).unlink()
    with pytest.raises(ValueError, match="is half-written"):
        read_manifest(tmp_path / "half")
    with pytest.raises(ValueError, match="is no prepared data"):
        read_manifest(tmp_path)


def test_a_finished_folder_is_kept_unless_overwritten(tmp_path: Path) -> None:
    prepare_sums(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="already holds prepared data"):
        claim(tmp_path, "text")
    assert contents(tmp_path) == before
    claim(tmp_path, "text", overwrite=True)
    assert list(contents(tmp_path)) == [MARK]


def test_a_half_written_folder_is_started_over(tmp_path: Path) -> None:
    claim(tmp_path, "text")
    (tmp_path / "train-00000.tokens.npy").write_bytes(b"half")
    (tmp_path / ".tmp-1-train-00001.tokens.npy").write_bytes(b"half")
    claim(tmp_path, "text")
    assert list(contents(tmp_path)) == [MARK]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_foreign_folder_is_left_alone(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds 'thesis.tex'"):
        claim(tmp_path, "text", overwrite)
    prepare_sums(tmp_path / "data")
    (tmp_path / "data" / "notes.txt").write_text("mine")
    before = contents(tmp_path / "data")
    with pytest.raises(ValueError, match=r"holds 'notes.txt'"):
        claim(tmp_path / "data", "text", overwrite)
    assert contents(tmp_path / "data") == before
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "train-00000.tokens.npy").write_bytes(b"of another program: no mark, no manifest")
    with pytest.raises(ValueError, match=r"holds 'train-00000.tokens.npy'"):
        claim(tmp_path / "shards", "text", overwrite)
    with pytest.raises(ValueError, match="is a file"):
        claim(tmp_path / "thesis.tex", "text", overwrite)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "value"
    path.write_text("old")

    def write() -> None:
        with replacing(path) as file:
            file.write(b"new")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk"):
        write()
    assert contents(tmp_path) == {"value": b"old"}


def test_another_tokenizer_than_the_data_was_prepared_with_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    name = save_tokenizer(tmp_path / "tokenizer")
    write(tmp_path / "data", **_one_document_a_split(name))
    assert read_manifest(tmp_path / "data")["tokenizer_sha256"] == get_tokenizer(name).sha256
    path = tmp_path / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    os.utime(path, (1, 1))
    with pytest.raises(ValueError, match=r"is not the one that the data was prepared with: the sha256"):
        read_manifest(tmp_path / "data")


def _one_document_a_split(tokenizer: str) -> dict[str, Any]:
    return {
        "dataset": "text",
        "options": TextOptions(tokenizer=tokenizer),
        "items": lambda start: iter(SPLITS[start:]),
        "weigh": len,
        "work": lambda split: Worked((Document(split, "text", b"the word"),)),
        "tokenizer": tokenizer,
        "document_masking": False,
        "workers": 1,
    }

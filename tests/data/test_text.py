from __future__ import annotations

import gzip
import json
import os
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tangolm.data import open_split, prepare
from tangolm.data import text as text_module
from tests.data.tiny import contents


def stream(folder: Path, split: str) -> list[bytes]:
    """The documents of a split, read back from its rows; padding at the end is left out."""
    opened = open_split(folder, split)
    rows = [opened.row(index) for index in range(opened.rows)]
    tokens = np.concatenate([row for row, _ in rows])[np.concatenate([marks for _, marks in rows])].tolist()
    assert tokens[-1] == 256
    found, start = [], 0
    for end in [place for place, token in enumerate(tokens) if token == 256]:
        found.append(bytes(tokens[start:end]))
        start = end + 1
    return found


def many_files(root: Path, count: int = 120) -> dict[str, bytes]:
    texts = {
        f"part{number % 7}/file{number:03d}.txt": f"file number {number}\n".encode() * 3 for number in range(count)
    }
    write(root, texts)
    return texts


def write(root: Path, texts: dict[str, bytes]) -> None:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text)


HARD = {
    "crlf.txt": b"one\r\ntwo\r\n",
    "nul.txt": b"a\x00b",
    "marked.txt": b"\xef\xbb\xbfwith a byte order mark",
    "inner.txt": b"a mark inside \xef\xbb\xbf stays",
    "space.txt": b" \n\t ",
    "end.txt": b"<|endoftext|>",
    "invalid.txt": b"caf\xe9 \xac \xff",
    "unicode.txt": "naïve ∑ 漢字 🙂".encode(),
}


@pytest.mark.case(32, 33)
def test_bytes_are_kept_and_each_document_has_one_end_token(tmp_path: Path) -> None:
    texts = many_files(tmp_path / "in") | HARD
    write(tmp_path / "in", texts)
    write(tmp_path / "in", {"empty.txt": b"", "only_mark.txt": b"\xef\xbb\xbf", "copy.txt": b"a\x00b"})
    manifest = prepare("text", tmp_path / "in", tmp_path / "out", context=32)
    assert manifest["passed_over"] == {"empty": 2, "copies": 1, "links": 0, "byte_order_marks": 2}
    read = {split: stream(tmp_path / "out", split) for split in ("train", "dev", "test")}
    expected = {name: text.removeprefix(b"\xef\xbb\xbf") for name, text in texts.items()}
    expected["copy.txt"] = expected.pop("nul.txt")  # of two equal files the first in order stays
    assert sorted(document for part in read.values() for document in part) == sorted(expected.values())
    for part, documents in read.items():
        assert documents, part
        names = [name for name, text in sorted(expected.items()) if text in documents]
        assert documents == [expected[name] for name in names]  # in the order of the paths
        entry = manifest["splits"][part]
        assert entry["documents"] == len(documents)
        assert entry["bytes"] == sum(map(len, documents))
        assert entry["sources"] == [{"name": "text", "documents": len(documents), "rows": [0, entry["rows"]]}]


def test_two_preparations_are_equal_byte_for_byte(tmp_path: Path) -> None:
    many_files(tmp_path / "in")
    prepare("text", tmp_path / "in", tmp_path / "a")
    (tmp_path / "in").rename(tmp_path / "moved")
    prepare("text", tmp_path / "moved", tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_file_stays_in_its_split_when_others_come_and_go(tmp_path: Path) -> None:
    texts = many_files(tmp_path / "in", 120)
    prepare("text", tmp_path / "in", tmp_path / "a")
    for name in list(texts)[:40]:
        (tmp_path / "in" / name).unlink()
    prepare("text", tmp_path / "in", tmp_path / "b")
    for split in ("train", "dev", "test"):
        assert set(stream(tmp_path / "b", split)) <= set(stream(tmp_path / "a", split))


def test_a_single_file_is_cut_by_position_between_characters(tmp_path: Path) -> None:
    text = "漢字 and 🙂, again and again. " * 60
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    manifest = prepare("text", tmp_path / "book.txt", tmp_path / "out", context=64)
    parts = [stream(tmp_path / "out", split) for split in ("train", "dev", "test")]
    assert [len(part) for part in parts] == [1, 1, 1]
    assert "".join(part[0].decode("utf-8") for part in parts) == text
    size = len(text.encode())
    for split, part in (("dev", parts[1]), ("test", parts[2])):
        assert abs(len(part[0]) - 0.05 * size) < 5
        assert manifest["splits"][split]["bytes"] == len(part[0])


def test_include_exclude_suffixes_and_limit(tmp_path: Path) -> None:
    root = tmp_path / "in"
    many_files(root)
    write(
        root, {"a.rst": b"not read", ".hidden/b.txt": b"hidden", "site-packages/c.txt": b"foreign", "._d.txt": b"stray"}
    )

    def names(**options: Any) -> list[bytes]:
        prepare("text", root, tmp_path / "out", overwrite=True, split="position", **options)
        return stream(tmp_path / "out", "train")

    def heads(documents: list[bytes]) -> set[int]:
        return {int(document.split()[2]) for document in documents}

    assert heads(names()) == set(range(120))
    assert heads(names(include=("part3",))) == {n for n in range(120) if n % 7 == 3}
    assert heads(names(include=("part3/file01*",))) == {n for n in range(10, 20) if n % 7 == 3}
    assert heads(names(exclude=(".*", "site-packages", "part[0-5]"))) == {n for n in range(120) if n % 7 == 6}
    assert heads(names(exclude=(".*", "site-packages", "part3/*"))) == {n for n in range(120) if n % 7 != 3}
    few = heads(names(limit_bytes=1000))
    assert 10 < len(few) < 30
    assert few < heads(names(limit_bytes=2000))
    with pytest.raises(ValueError, match=r"0 files of .xyz"):
        names(suffixes=(".xyz",))


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_links_are_counted_and_not_followed(tmp_path: Path) -> None:
    many_files(tmp_path / "in")
    (tmp_path / "secret.txt").write_text("outside")
    (tmp_path / "in" / "link.txt").symlink_to(tmp_path / "secret.txt")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in")
    manifest = prepare("text", tmp_path / "in", tmp_path / "out")
    assert manifest["passed_over"]["links"] == 1
    assert sum(entry["documents"] for entry in manifest["splits"].values()) == 120


def test_masking_is_a_switch(tmp_path: Path) -> None:
    many_files(tmp_path / "in")
    plain = prepare("text", tmp_path / "in", tmp_path / "plain")["splits"]["train"]
    masked = prepare("text", tmp_path / "in", tmp_path / "masked", document_masking=True)["splits"]["train"]
    assert not open_split(tmp_path / "plain", "train").document_masking
    assert open_split(tmp_path / "masked", "train").document_masking
    assert plain["supervised_tokens"] - masked["supervised_tokens"] > 100  # the first token of each document


def record_files(root: Path) -> list[bytes]:
    """Text in files of records of all kinds; one text comes twice."""
    root.mkdir()
    texts = [f"record number {number} 漢字".encode() for number in range(90)]
    lines = [json.dumps({"text": text.decode(), "body": "b"}, ensure_ascii=False).encode() + b"\n" for text in texts]
    (root / "a.jsonl").write_bytes(b"".join(lines[:30]))
    (root / "b.jsonl.gz").write_bytes(gzip.compress(b"".join([*lines[30:45], lines[0]])))
    (root / "c.jsonl.zst").write_bytes(zstandard.compress(b"".join(lines[45:60])))
    pq.write_table(pa.table({"text": [text.decode() for text in texts[60:]] + [""]}), root / "d.parquet")
    (root / "._a.jsonl").write_bytes(b"\x00\x05\x16\x07")
    return texts


@pytest.mark.case(31, 33)
def test_each_record_is_a_document_placed_by_its_text(tmp_path: Path) -> None:
    texts = record_files(tmp_path / "in")
    manifest = prepare("text", tmp_path / "in", tmp_path / "out", context=32)
    read = {split: stream(tmp_path / "out", split) for split in ("train", "dev", "test")}
    assert [text for text in texts if text in read["train"]] == read["train"]
    assert sorted(text for part in read.values() for text in part) == sorted(texts)
    assert manifest["passed_over"] == {"empty": 1, "copies": 1, "links": 0, "byte_order_marks": 0}
    (tmp_path / "in" / "b.jsonl.gz").unlink()
    prepare("text", tmp_path / "in", tmp_path / "fewer", context=32)
    for split in read:
        assert set(stream(tmp_path / "fewer", split)) <= set(read[split])


@pytest.mark.slow
@pytest.mark.case(31)
def test_lines_that_hold_no_text_are_named_or_skipped_and_counted(tmp_path: Path) -> None:
    texts = record_files(tmp_path / "in")
    long = "long " * (20 * 2**20 // 5)  # 20 MB in a line
    lines = [b'{"text": "\xac"}', b'{"text": null}', json.dumps({"text": long}).encode(), b"{"]
    (tmp_path / "in" / "wrong.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=r"wrong.jsonl' line 1 is no UTF-8 \(byte 0xac.*on_error='skip'") as caught:
        prepare("text", tmp_path / "in", tmp_path / "out")
    assert "\n" not in str(caught.value)
    manifest = prepare("text", tmp_path / "in", tmp_path / "out", on_error="skip", overwrite=True, context=2**16)
    assert manifest["passed_over"]["bad_records"] == 3
    found = [text for split in ("train", "dev", "test") for text in stream(tmp_path / "out", split)]
    assert sorted(found) == sorted([*texts, long.encode()])
    with pytest.raises(ValueError, match="line 3 is larger than 2,000,000 bytes"):
        prepare("text", tmp_path / "in", tmp_path / "out", on_error="skip", overwrite=True, record_limit="2M")


def test_field_names_the_text(tmp_path: Path) -> None:
    record_files(tmp_path / "in")
    with pytest.raises(ValueError, match=r"a.jsonl' line 1 has no field 'txt'; it has 'text', 'body'"):
        prepare("text", tmp_path / "in" / "a.jsonl", tmp_path / "out", field="txt")
    with pytest.raises(ValueError, match=r"d.parquet' has no column 'body'; it has 'text'"):
        prepare("text", tmp_path / "in", tmp_path / "out", field="body", overwrite=True)


@pytest.mark.parametrize("split", ["path", "position"])
def test_packed_files_give_what_they_hold(tmp_path: Path, split: str) -> None:
    texts = many_files(tmp_path / "in") | {"漢.txt": "漢字 and 🙂. ".encode() * 50}
    write(tmp_path / "in", texts)
    for number, (name, text) in enumerate(texts.items()):
        place = tmp_path / "packed" / (name + (".gz", ".zst")[number % 2])
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes((gzip.compress, zstandard.compress)[number % 2](b"\xef\xbb\xbf" * (number % 3 == 0) + text))
    manifest = prepare("text", tmp_path / "packed", tmp_path / "a", split=split)
    assert manifest["passed_over"]["byte_order_marks"] == 41
    found = [text for part in ("train", "dev", "test") for text in stream(tmp_path / "a", part)]
    if split == "path":
        assert sorted(found) == sorted(texts.values())
    else:
        assert sum(map(len, found)) == sum(map(len, texts.values()))
        [part.decode("utf-8") for part in found]  # cut between characters
    with pytest.raises(ValueError, match=r"', unpacked, is larger than 40 bytes; leave it out, or raise record_limit"):
        prepare("text", tmp_path / "packed", tmp_path / "b", record_limit=40)


def test_a_long_file_is_tokenised_in_pieces_as_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {f"{number}.txt": "a word, 漢字 and  another\n\nword. ".encode() * 40 for number in range(60)}
    write(tmp_path / "in", {name: text + name.encode() for name, text in texts.items()})
    prepare("text", tmp_path / "in", tmp_path / "a", tokenizer="gpt2")
    monkeypatch.setattr(text_module, "PIECE", 100)
    prepare("text", tmp_path / "in", tmp_path / "b", tokenizer="gpt2")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize("rest", [b"x" * 50, "漢".encode() * 20, b"\xac" * 50, b"\x00" * 50, b"ab "])
def test_pieces_are_the_whole(tmp_path: Path, rest: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "PIECE", 16)
    (tmp_path / "a").write_bytes(rest * 5)
    pieces = list(text_module._pieces(tmp_path / "a", "train", 0, len(rest) * 5))
    assert b"".join(piece.text for piece in pieces) == rest * 5
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    if rest[0] != 0xAC:
        [piece.text.decode("utf-8") for piece in pieces]


def test_tokens_end_the_training_exactly_and_the_others_at_their_share(tmp_path: Path) -> None:
    record_files(tmp_path / "in")
    whole = prepare("text", tmp_path / "in", tmp_path / "whole", context=8, dev_fraction=0.2, test_fraction=0.2)
    few = prepare(
        "text", tmp_path / "in", tmp_path / "few", context=8, dev_fraction=0.2, test_fraction=0.2, tokens="0.6k"
    )
    assert few["arguments"]["tokens"] == 600
    assert [few["splits"][split]["tokens"] for split in ("train", "dev", "test")] == [600, 200, 200]
    assert whole["splits"]["train"]["tokens"] > 600


@pytest.mark.slow
def test_two_processes_and_gpt2_give_the_same_bytes(tmp_path: Path) -> None:
    options = {"exclude": ("site-packages", "test", "tests", "lib2to3", "idlelib", ".*"), "tokenizer": "gpt2"}
    stdlib = sysconfig.get_path("stdlib")
    one = prepare("text", stdlib, tmp_path / "a", workers=1, limit_bytes=8_000_000, **options)
    prepare("text", stdlib, tmp_path / "b", workers=2, limit_bytes=8_000_000, **options)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert one["vocab_size"] == 50_257
    assert 2 < one["splits"]["train"]["bytes_per_token"] < 4


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"context": 1}, "context must be at least 2, got 1"),
    ({"context": "256"}, "context must be int"),
    ({"contxt": 256}, "unknown key 'contxt'; did you mean 'context'"),
    ({"tokenizer": "gpt3"}, "tokenizer 'gpt3' is not known"),
    ({"suffixes": ("py",)}, "suffixes has 'py', which has no dot"),
    ({"tokens": "1.5X"}, "tokens must be a whole number of 1 or more such as 2000000, 300M or 1.5B, got '1.5X'"),
    ({"tokens": "0.0001k"}, "tokens must be a whole number"),
    ({"tokens": 0}, "tokens must be a whole number of 1 or more"),
    ({"on_error": "ignore"}, "on_error must be one of"),
    ({"workers": 0}, "workers must be at least 1"),
    ({"tokenizer": "hf:/nowhere"}, "tokenizer 'hf:/nowhere' is no folder with a tokenizer.json"),
    ({"split": "random"}, "split must be one of"),
    ({"limit_bytes": 0}, "limit_bytes must be at least 1"),
    ({"dev_fraction": 0.0}, "dev_fraction must be above 0"),
    ({"test_fraction": 0.5}, "test_fraction must be above 0 and below 0.5"),
    ({"document_masking": "yes"}, "document_masking must be bool"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_options_are_refused_by_name(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    many_files(tmp_path / "in", 10)
    with pytest.raises(ValueError, match=message) as caught:
        prepare("text", tmp_path / "in", tmp_path / "out", **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_source_that_gives_nothing_is_refused_and_old_data_kept(tmp_path: Path) -> None:
    many_files(tmp_path / "in")
    prepare("text", tmp_path / "in", tmp_path / "out")
    before = contents(tmp_path / "out")
    (tmp_path / "none").mkdir()
    for source, message in (
        (None, "source is missing"),
        ("nowhere", "'nowhere' does not exist"),
        (tmp_path / "none", "0 files"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare("text", source, tmp_path / "out", overwrite=True)
    with pytest.raises(ValueError, match="dataset 'txt' is not known; did you mean 'text'"):
        prepare("txt", tmp_path / "in", tmp_path / "out")
    with pytest.raises(ValueError, match="already holds"):
        prepare("text", tmp_path / "in", tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    many_files(tmp_path / "in")
    seen: list[tuple[int, int]] = []
    prepare("text", tmp_path / "in", tmp_path / "out", progress=lambda done, total, text: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == sum(len(t) for t in many_files(tmp_path / "in").values())


@pytest.mark.slow
def test_the_standard_library_can_be_prepared(tmp_path: Path) -> None:
    manifest = prepare("text", sysconfig.get_path("stdlib"), tmp_path, exclude=("site-packages", "test", "tests", ".*"))
    train = manifest["splits"]["train"]
    assert train["bytes"] > 2_000_000
    assert sum(entry["documents"] for entry in manifest["splits"].values()) > 200
    for split in ("train", "dev", "test"):
        open_split(tmp_path, split).verify()

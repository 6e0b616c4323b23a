from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tangolm.data import open_split, prepare
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


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"context": 1}, "context must be at least 2, got 1"),
    ({"context": "256"}, "context must be int"),
    ({"contxt": 256}, "unknown key 'contxt'; did you mean 'context'"),
    ({"tokenizer": "gpt3"}, "tokenizer 'gpt3' is not known"),
    ({"suffixes": ("py",)}, "suffixes has 'py', which has no dot"),
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

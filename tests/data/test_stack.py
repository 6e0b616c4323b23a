"""Source code: parquet of the published schemas, folders, the standard library."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tangolm.data import encoded, open_split, pipeline, prepare
from tangolm.data.stack import StackOptions
from tangolm.data.stack_parquet import Parts
from tangolm.data.stack_rows import Wanted, permuted
from tests.data.test_text import stream, write
from tests.data.tiny import contents

ANY = Wanted(frozenset(), frozenset(), True, 10**6)
FILE = pa.struct(  # as the card of HuggingFaceCode/stack-v3-train states it
    [
        ("content_id", pa.string()),
        ("content", pa.string()),
        ("size_bytes", pa.int64()),
        ("file_path", pa.string()),
        ("file_timestamp", pa.int64()),
        ("language", pa.string()),
        ("is_vendor", pa.bool_()),
        ("license_type", pa.string()),
        ("detected_licenses", pa.list_(pa.string())),
    ]
)
METADATA = pa.struct(
    [("branch", pa.string()), ("commit_count", pa.int32()), ("is_fork", pa.bool_()), ("stars", pa.int32())]
)
VERSION_3 = pa.schema(
    [
        ("repo_path", pa.string()),
        ("repo_id", pa.int64()),
        ("commit_id", pa.string()),
        ("github_metadata", METADATA),
        ("num_files", pa.int64()),
        ("files", pa.list_(FILE)),
    ]
)


def file(content: str | None, language: str = "Python", **fields: Any) -> dict[str, Any]:
    return {
        "content_id": "0" * 40,
        "content": content,
        "size_bytes": None if content is None else len(content.encode()),
        "file_path": "src/a.py",
        "file_timestamp": 1674821846,
        "language": language,
        "is_vendor": False,
        "license_type": "no_license",
        "detected_licenses": [],
        **fields,
    }


def row(number: int, files: list[dict[str, Any]] | None) -> dict[str, Any]:
    return {
        "repo_path": f"owner{number % 7}/project{number}",
        "repo_id": number,
        "commit_id": "f" * 40,
        "github_metadata": {"branch": "main", "commit_count": 2, "is_fork": False, "stars": 0},
        "num_files": len(files or ()),
        "files": files,
    }


def repositories(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Rows of 0 to 3 small files each."""
    return [
        row(number, [file(f"def f{number}_{index}():\n    return '∑'\n") for index in range(number % 4)])
        for number in range(first, first + count)
    ]


def save(path: Path, rows: list[dict[str, Any]], schema: pa.Schema = VERSION_3, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, **options)
    return path


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """Three parts of 40 repositories, in several row groups each."""
    for part in range(3):
        save(tmp_path / "parts" / f"part-{part}.parquet", repositories(40, 40 * part), row_group_size=17)
    return tmp_path / "parts"


def texts(folder: Path) -> dict[str, list[bytes]]:
    return {split: stream(folder, split) for split in ("train", "dev", "test")}


def test_each_file_is_a_document_and_a_repository_is_of_one_split(parts: Path, tmp_path: Path) -> None:
    options = {"dev_fraction": 0.2, "test_fraction": 0.2}
    manifest = prepare("stack", parts, tmp_path / "out", workers=1, **options)
    found = texts(tmp_path / "out")
    of_split: dict[str, list[bytes]] = {"train": [], "dev": [], "test": []}
    for one in repositories(120):
        of_split[StackOptions(**options).split(one["repo_path"])] += [f["content"].encode() for f in one["files"]]
    assert {split: sorted(documents) for split, documents in found.items()} == {
        split: sorted(documents) for split, documents in of_split.items()
    }
    assert all(found.values())
    assert (manifest["dataset"], manifest["origin"], manifest["parts"]) == ("stack", "rows", 3)
    assert manifest["fields"] == {
        "read": {
            "content": "content",
            "language": "language",
            "license_type": "license_type",
            "licenses": "detected_licenses",
            "vendored": "is_vendor",
        },
        "missing": ["generated"],
        "unknown": [
            "repo_id",
            "commit_id",
            "github_metadata",
            "num_files",
            "files.content_id",
            "files.size_bytes",
            "files.file_path",
            "files.file_timestamp",
        ],
    }
    for split, entry in manifest["splits"].items():
        assert entry["bytes"] == sum(map(len, found[split]))
        assert [source["name"] for source in entry["sources"]] == ["Python"]


def test_filters_pass_over_by_name(tmp_path: Path) -> None:
    files = [
        file("kept = 1\n" * 3, license_type="permissive", detected_licenses=["MIT", "Apache-2.0"]),
        file("let other = 2;\n", "Rust", license_type="permissive"),
        file("vendored = 3\n", is_vendor=True, license_type="permissive"),
        file("unlicensed = 4\n"),
        file("x" * 101, license_type="permissive"),
        file(None, license_type="permissive"),
        file("", license_type="permissive"),
        file("\ufeffmarked = 5\n", license_type=None, detected_licenses=["mit"]),
    ]
    own = [row(number, [file(f"n{number} = 1\n", "python", license_type="Permissive")]) for number in range(1, 90)]
    rows = [row(0, files), *own, row(90, None)]
    save(tmp_path / "part.parquet", rows)
    manifest = prepare(
        "stack",
        tmp_path / "part.parquet",
        tmp_path / "out",
        languages=["PYTHON"],
        licenses=["permissive", "MIT"],
        max_bytes=100,
        workers=1,
    )
    assert manifest["passed_over"] == {
        "other_language": 1,
        "vendored": 1,
        "other_license": 1,
        "too_large": 1,
        "without_content": 1,
        "empty": 1,
        "byte_order_marks": 1,
    }
    found = [text for split in texts(tmp_path / "out").values() for text in split]
    assert sorted(found) == sorted(
        [b"kept = 1\n" * 3, b"marked = 5\n"] + [f"n{n} = 1\n".encode() for n in range(1, 90)]
    )
    kept = prepare("stack", tmp_path / "part.parquet", tmp_path / "all", vendored=True, workers=1)
    assert kept["passed_over"] == {"without_content": 1, "empty": 1, "byte_order_marks": 1}


def test_of_equal_contents_one_is_kept_whatever_its_split(tmp_path: Path) -> None:
    rows = [row(number, [file("the same\n"), file(f"own {number}\n"), file("the same\n")]) for number in range(100)]
    save(tmp_path / "part.parquet", rows)
    manifest = prepare("stack", tmp_path / "part.parquet", tmp_path / "out", workers=1)
    assert manifest["passed_over"] == {"copies": 199}
    found = [text for split in texts(tmp_path / "out").values() for text in split]
    assert sorted(found) == sorted([b"the same\n"] + [f"own {number}\n".encode() for number in range(100)])


def test_a_row_may_be_a_file_as_in_version_2_with_contents(tmp_path: Path) -> None:
    schema = pa.schema(
        [
            ("blob_id", pa.string()),
            ("path", pa.string()),
            ("detected_licenses", pa.list_(pa.string())),
            ("license_type", pa.string()),
            ("repo_name", pa.string()),
            ("language", pa.string()),
            ("is_vendor", pa.bool_()),
            ("is_generated", pa.bool_()),
            ("length_bytes", pa.int64()),
            ("content", pa.large_string()),
        ]
    )
    rows = [
        {
            "repo_name": f"o/r{number // 2}",
            "path": "/a.c",
            "language": "C",
            "is_generated": number == 7,
            "content": f"{number};\n",
        }
        for number in range(120)
    ]
    save(tmp_path / "part.parquet", rows, schema)
    manifest = prepare("stack", tmp_path / "part.parquet", tmp_path / "out", workers=1)
    assert manifest["passed_over"] == {"generated": 1}
    assert manifest["fields"]["missing"] == []
    assert manifest["fields"]["unknown"] == ["blob_id", "path", "length_bytes"]
    options = StackOptions()
    for split, documents in texts(tmp_path / "out").items():
        assert {options.split(f"o/r{int(text[:-2]) // 2}") for text in documents} == {split}


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ([("repo_path", pa.string())], {}, "has no content, only repo_path: .* take a copy with contents"),
        ([("content", pa.string())], {}, "has none of repo_path, repo_name, .*; it has content"),
        ([("repo_path", pa.string()), ("content", pa.int64())], {}, "content is int64, but must be text"),
        ([("repo_path", pa.string()), ("files", pa.string())], {}, "files is string, but must be a list of structs"),
        ([("repo_path", pa.string()), ("content", pa.string())], {"languages": ["C"]}, "has no language or lang"),
        (
            [("repo_path", pa.string()), ("content", pa.string())],
            {"licenses": ["MIT"]},
            "has no license_type or detected_licenses or max_stars_repo_licenses",
        ),
    ],
)
def test_a_part_without_what_is_needed_is_named(
    tmp_path: Path, fields: list[tuple[str, Any]], options: dict[str, Any], message: str
) -> None:
    save(tmp_path / "odd.parquet", [], pa.schema(fields))
    with pytest.raises(ValueError, match=rf"part 'odd\.parquet'.* {message}"):
        prepare("stack", tmp_path / "odd.parquet", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_damaged_parts_and_parts_without_rows(parts: Path, tmp_path: Path) -> None:
    save(parts / "none.parquet", [])
    wanted = prepare("stack", parts, tmp_path / "a", workers=1)["splits"]
    (parts / "none.parquet").unlink()
    assert wanted == prepare("stack", parts, tmp_path / "b", workers=1)["splits"]
    (parts / "._part-0.parquet").write_bytes(b"\x00\x05\x16\x07")  # a stray of another system
    prepare("stack", parts, tmp_path / "c", workers=1)
    whole = (parts / "part-1.parquet").read_bytes()
    (parts / "part-1.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"part 'part-1\.parquet' is no parquet that can be read"):
        prepare("stack", parts, tmp_path / "d", workers=1)
    save(tmp_path / "empty.parquet", [])
    with pytest.raises(ValueError, match="split 'train' would be empty"):
        prepare("stack", tmp_path / "empty.parquet", tmp_path / "e", workers=1)


def test_reading_goes_on_from_any_row(parts: Path) -> None:
    opened = Parts(permuted(os.listdir(parts), 3), lambda name: (parts / name).open("rb"))
    whole = list(opened.repositories(ANY))
    assert len(whole) == 120
    for start in (0, 1, 16, 17, 33, 39, 40, 41, 80, 97, 119, 120, 500):
        assert list(opened.repositories(ANY, start)) == whole[start:]


def test_the_seed_permutes_the_parts(parts: Path) -> None:
    names = sorted(os.listdir(parts))
    orders = {permuted(names, seed) for seed in range(30)}
    assert len(orders) == 6
    assert all(sorted(order) == names for order in orders)
    assert permuted(reversed(names), 5) == permuted(names, 5)


def test_a_huge_repository_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tangolm.data.stack_rows.MOST", 10)
    save(tmp_path / "part.parquet", [row(1, [file("abcdef"), file("ghijk"), file("lmno")])])
    (found,) = Parts(("part.parquet",), lambda name: (tmp_path / name).open("rb")).repositories(ANY)
    assert found.files == (("Python", b"abcdef"), ("Python", b"lmno"))
    assert found.counts == {"too_large_repository": 1}


def test_tokens_end_the_splits_exactly(parts: Path, tmp_path: Path) -> None:
    options = {"dev_fraction": 0.2, "test_fraction": 0.2, "tokens": "0.6k", "context": 50}
    manifest = prepare("stack", parts, tmp_path / "out", workers=1, **options)
    assert {split: entry["tokens"] for split, entry in manifest["splits"].items()} == {
        "train": 600,
        "dev": 200,
        "test": 200,
    }


def break_off(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on reading breaks off after 45 rows; the numbers of the rows at which it began."""
    read, starts = Parts.repositories, []

    def broken(self: Parts, wanted: Wanted, start: int = 0) -> Any:
        starts.append(start)
        for number, one in enumerate(read(self, wanted, start)):
            if number == 45:
                raise KeyboardInterrupt
            yield one

    monkeypatch.setattr(Parts, "repositories", broken)
    monkeypatch.setattr(pipeline, "JOURNAL_SECONDS", 0.0)
    monkeypatch.setattr(encoded, "CHUNK_ITEMS", 10)
    return starts


def test_interrupted_it_goes_on_to_the_same_bytes(parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare("stack", parts, tmp_path / "straight", workers=1)
    starts = break_off(monkeypatch)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            prepare("stack", parts, tmp_path / "parted", workers=1)
    prepare("stack", parts, tmp_path / "parted", workers=1)
    assert starts == [0, 40, 80]
    assert contents(tmp_path / "parted") == contents(tmp_path / "straight")


def test_a_branch_that_moved_is_told_and_its_commit_goes_on(
    hub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = break_off(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        prepare("stack", None, tmp_path / "out", hub="someone/code", workers=1)
    hub.append("moved")
    with pytest.raises(ValueError, match='whose revision was "c0ffee" and is now "decade"; give what it began with'):
        prepare("stack", None, tmp_path / "out", hub="someone/code", workers=1)
    with pytest.raises(KeyboardInterrupt):
        prepare("stack", None, tmp_path / "out", hub="someone/code", revision="c0ffee", workers=1)
    assert starts == [0, 40]


def json_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(json.dumps(one, ensure_ascii=False).encode() + b"\n" for one in rows))
    return path


def test_json_lines_give_what_parquet_gives(parts: Path, tmp_path: Path) -> None:
    for part in range(3):
        json_lines(tmp_path / "json" / f"part-{part}.jsonl", repositories(40, 40 * part))
    (tmp_path / "json" / "._part-0.jsonl").write_bytes(b"\x00\x05\x16\x07")  # a stray of another system
    own = prepare("stack", tmp_path / "json", tmp_path / "a", workers=1)
    assert own["fields"] == prepare("stack", parts, tmp_path / "b", workers=1)["fields"]
    names = {suffix: permuted([f"part-{part}{suffix}" for part in range(3)], 0) for suffix in (".jsonl", ".parquet")}
    same = [Path(name).stem for name in names[".jsonl"]] == [Path(name).stem for name in names[".parquet"]]
    for split, documents in texts(tmp_path / "a").items():
        other = stream(tmp_path / "b", split)
        assert documents == other if same else sorted(documents) == sorted(other)
    one = json_lines(tmp_path / "one.jsonl", repositories(120))
    (tmp_path / "one.jsonl.gz").write_bytes(gzip.compress(one.read_bytes()))
    prepare("stack", one, tmp_path / "c", workers=1)
    prepare("stack", tmp_path / "one.jsonl.gz", tmp_path / "d", workers=1)
    assert contents(tmp_path / "c") == contents(tmp_path / "d")


@pytest.mark.case(31)
def test_a_line_that_cannot_be_used_is_named_or_counted(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "a.jsonl", repositories(120))
    good = path.read_bytes()
    null = json.dumps(row(1, [file(None)])).encode()
    faults = {
        b'{"repo_path": "\xac", "files": []}': "is no UTF-8",
        b"[1]": "is no JSON object",
        b'{"files": []}': "has none of repo_path, repo_name",
        b'{"repo_path": "a/b", "files": [1]}': "its files are no list of objects",
        b'{"repo_path": "a/b", "files": [{"content": 5}]}': "its field 'content' is no text but int",
        b'{"repo_path": "a/b", "files": [{"path": "x"}]}': "has no field 'content'",
        b'{"repo_path": "a/b", "files": [{"content": "x", "detected_licenses": "MIT"}]}': "are no list but str",
    }
    for line, message in faults.items():
        path.write_bytes(good + line + b"\n")
        with pytest.raises(ValueError, match=rf"a\.jsonl' line 121.*{message}.* on_error='skip'"):
            prepare("stack", path, tmp_path / "out", workers=1, overwrite=True)
    path.write_bytes(good + b"\n".join([*faults, null, b""]))
    manifest = prepare("stack", path, tmp_path / "skipped", on_error="skip", workers=1)
    assert manifest["passed_over"] == {"bad_records": len(faults), "without_content": 1}
    assert sum(entry["documents"] for entry in manifest["splits"].values()) == 180
    large = "x = 1\n" * 200_000
    path.write_bytes(good + json.dumps(row(900, [file(large)])).encode())
    prepare("stack", path, tmp_path / "large", max_bytes=2_000_000, workers=1)
    assert large.encode() in [text for split in texts(tmp_path / "large").values() for text in split]


def test_a_first_line_without_what_is_needed_is_passed_over_like_any_other(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "a.jsonl", [{"files": [file("x")]}, {"repo_name": "a/b", "id": 0}, *repositories(180)])
    with pytest.raises(ValueError, match=r"a\.jsonl' line 1 has none of repo_path, repo_name"):
        prepare("stack", path, tmp_path / "out", workers=1)
    manifest = prepare("stack", path, tmp_path / "out", on_error="skip", workers=1)
    assert manifest["passed_over"]["bad_records"] == 2
    assert manifest["fields"]["read"]["content"] == "content"
    json_lines(path, [{"repo_name": "a/b", "id": 0}])
    with pytest.raises(ValueError, match=r"a\.jsonl' line 1 has no content, only repo_name, id"):
        prepare("stack", path, tmp_path / "ids", on_error="skip", workers=1)


def test_rows_of_two_kinds_or_without_files_are_refused(parts: Path, tmp_path: Path) -> None:
    json_lines(parts / "more.jsonl", repositories(2))
    with pytest.raises(ValueError, match="holds parquet and JSON lines; name a folder or file of one of them"):
        prepare("stack", parts, tmp_path / "out")
    json_lines(tmp_path / "none.jsonl", [row(1, []), row(2, None)])
    with pytest.raises(ValueError, match=r"none\.jsonl: no line has a file"):
        prepare("stack", tmp_path / "none.jsonl", tmp_path / "out")
    json_lines(tmp_path / "ids.jsonl", [{"repo_name": "a/b", "blob_id": "0"}])
    with pytest.raises(ValueError, match=r"ids\.jsonl' line 1 has no content, only repo_name, blob_id"):
        prepare("stack", tmp_path / "ids.jsonl", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_two_processes_give_the_same_bytes(parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "ALONE", 0)
    for workers in (1, 2):
        prepare("stack", parts, tmp_path / f"rows{workers}", workers=workers)
    assert contents(tmp_path / "rows1") == contents(tmp_path / "rows2")
    write(tmp_path / "in", {f"f{number}.c": f"int f{number};\n".encode() for number in range(200)})
    for workers in (1, 2):
        prepare("stack", tmp_path / "in", tmp_path / f"files{workers}", workers=workers)
    assert contents(tmp_path / "files1") == contents(tmp_path / "files2")


@pytest.fixture
def hub(parts: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub that has the parts; what is asked of it."""
    asked: list[str] = []

    def dataset_info(self: Any, dataset: str, revision: str) -> SimpleNamespace:
        asked.append(f"{dataset} {revision}")
        if dataset != "someone/code":
            raise RuntimeError("404")
        names = ["README.md", *(f"data/{name}" for name in os.listdir(parts))]
        sha = revision if revision != "main" else "decade" if "moved" in asked else "c0ffee"
        return SimpleNamespace(sha=sha, siblings=[SimpleNamespace(rfilename=name) for name in names])

    class Files:
        def open(self, path: str, mode: str, block_size: int) -> Any:
            asked.append(path)
            return io.BytesIO((parts / path.partition("/data/")[2]).read_bytes())

    monkeypatch.setattr("huggingface_hub.HfApi", lambda: SimpleNamespace(dataset_info=partial_of(dataset_info)))
    monkeypatch.setattr("huggingface_hub.HfFileSystem", Files)
    return asked


def partial_of(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **named: function(None, *arguments, **named)


def test_the_hub_is_read_at_the_commit_that_the_manifest_names(hub: list[str], parts: Path, tmp_path: Path) -> None:
    manifest = prepare("stack", None, tmp_path / "out", hub="someone/code", revision="main", workers=1)
    assert manifest["origin"] == "Hugging Face hub: someone/code"
    assert manifest["arguments"]["revision"] == "c0ffee"  # the commit that main is
    assert hub[0] == "someone/code main"
    assert sorted(set(hub[1:])) == [f"datasets/someone/code@c0ffee/data/part-{part}.parquet" for part in range(3)]
    local = prepare("stack", parts, tmp_path / "local", workers=1)
    total = {split: entry["documents"] for split, entry in local["splits"].items()}
    assert {split: entry["documents"] for split, entry in manifest["splits"].items()} == total
    with pytest.raises(ValueError, match=r"hub 'no/thing' at revision 'main' cannot be listed \(RuntimeError: 404\)"):
        prepare("stack", None, tmp_path / "none", hub="no/thing")
    with pytest.raises(ValueError, match="hub 'someone/code' does not go with a source"):
        prepare("stack", parts, tmp_path / "none", hub="someone/code")
    assert not (tmp_path / "none").exists()


def test_a_folder_of_source_code(tmp_path: Path) -> None:
    code = {f"pkg/mod{number}.py": f"x = {number}\n".encode() for number in range(80)}
    code |= {f"src/lib{number}.rs": f"fn f{number}() {{}}\r\n\x00\xff".encode("latin-1") for number in range(20)}
    write(tmp_path / "in", code)
    write(tmp_path / "in", {"notes.txt": b"no code", "copy.py": b"x = 3\n", "empty.py": b"", "big.py": b"#" * 2000})
    write(tmp_path / "in", {"vendor/v.py": b"v", ".git/hook.py": b"h", "._stray.py": b"s"})
    (tmp_path / "in" / "link.py").symlink_to(tmp_path / "in" / "notes.txt")
    manifest = prepare("stack", tmp_path / "in", tmp_path / "out", max_bytes=1000, workers=1)
    assert manifest["passed_over"] == {"links": 1, "too_large": 1, "vendored_folders": 2, "empty": 1, "copies": 1}
    found = texts(tmp_path / "out")
    names = {text: name for name, text in code.items()} | {b"x = 3\n": "copy.py"}
    options = StackOptions()
    for split, documents in found.items():
        assert {options.split(names[text]) for text in documents} == {split}
        assert [names[text] for text in documents] == sorted(names[text] for text in documents)
    assert sorted(text for documents in found.values() for text in documents) == sorted(code.values())
    assert [source["name"] for source in manifest["splits"]["train"]["sources"]] == ["Python", "Rust"]
    rust = prepare("stack", tmp_path / "in", tmp_path / "rust", languages=["rust"], test_fraction=0.3, dev_fraction=0.3)
    assert sum(entry["documents"] for entry in rust["splits"].values()) == 20
    (tmp_path / "in").rename(tmp_path / "moved")
    prepare("stack", tmp_path / "moved", tmp_path / "again", max_bytes=1000, workers=1)
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


def test_what_cannot_be_done_with_a_folder_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "in", {"a.py": b"x\n", "notes.txt": b"y"})
    for options, message in (
        ({"licenses": ["MIT"]}, r"licenses \['MIT'\] cannot be told of the files"),
        ({"languages": ["Pyton"]}, "languages has 'Pyton', of which no suffix is known; did you mean 'Python'"),
        ({"languages": ["C"]}, "has no files of C"),
        ({"max_bytes": 2**25}, "max_bytes must be at most 16,777,216"),
        ({"max_bytes": 0}, "max_bytes must be at least 1"),
        ({"tokens": 0}, "tokens must be a whole number of 1 or more"),
        ({"on_error": "ignore"}, "on_error must be one of 'fail', 'skip'"),
        ({"dev_fraction": 0.5}, "dev_fraction must be above 0 and below 0.5"),
        ({"revision": ""}, "hub and revision must not be empty"),
        ({"context": 1}, "context must be at least 2"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare("stack", tmp_path / "in", tmp_path / "out", **options)
    with pytest.raises(ValueError, match="has no files of a known language"):
        prepare("stack", tmp_path / "in" / "notes.txt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_with_nothing_given_it_is_the_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "lib", {f"m{number}.py": f"import m{number}\n".encode() for number in range(60)})
    write(tmp_path / "lib", {"site-packages/other.py": b"other"})
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "lib") if name == "stdlib" else None)
    manifest = prepare("stack", None, tmp_path / "out", workers=1)
    assert manifest["origin"].startswith("standard library of Python 3.")
    assert sum(entry["documents"] for entry in manifest["splits"].values()) == 60
    assert str(tmp_path) not in json.dumps(manifest)
    assert open_split(tmp_path / "out", "train").rows


def test_every_option_but_the_processes_is_in_the_manifest(parts: Path, tmp_path: Path) -> None:
    manifest = prepare("stack", parts, tmp_path / "out", workers=1)
    assert set(manifest["arguments"]) == {field.name for field in dataclasses.fields(StackOptions)} - {"workers"}

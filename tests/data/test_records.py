from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tangolm.data.records import RecordError, lines, opened, parse, rows, suffix, text_of

PLAIN = b"one\ntwo\r\n\n  \nthree" + b" and more" * 1000


def pack(path: Path, data: bytes) -> Path:
    packed = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, lambda data: data)(data)
    path.write_bytes(packed)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_lines_are_read_from_plain_and_packed_files(tmp_path: Path, name: str) -> None:
    path = pack(tmp_path / name, b"\xef\xbb\xbf" + PLAIN)
    assert suffix(path) == ".jsonl"
    assert list(lines(path)) == [(1, b"one"), (2, b"two"), (5, PLAIN.splitlines()[-1])]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=3000) | st.integers(1, 200_000).map(bytes), max_size=4), st.integers(1, 100_000))
def test_zstandard_frames_come_back_whole(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], read: int
) -> None:
    path = tmp_path_factory.mktemp("zst") / "a.zst"
    path.write_bytes(b"".join(map(zstandard.compress, parts)))
    with opened(path) as stream:
        assert b"".join(iter(lambda: stream.read(read), b"")) == b"".join(parts)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_cut_and_damaged_packed_files_are_named(tmp_path: Path, name: str) -> None:
    whole = pack(tmp_path / name, PLAIN).read_bytes()
    for wrong in (whole[: len(whole) // 2], whole[:-1], b"\x00" + whole[1:], whole + b"rest"):
        (tmp_path / name).write_bytes(wrong)
        with pytest.raises(ValueError, match=rf"{name}' cannot be read or is damaged") as caught:
            list(lines(tmp_path / name))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_line_of_an_absurd_size_is_refused_in_little_memory(tmp_path: Path, name: str) -> None:
    path = pack(tmp_path / name, b"short\n" + b"0" * 2**27)  # packed it is some kilobytes
    reader = lines(path, limit=2**20)
    tracemalloc.start()
    assert next(reader) == (1, b"short")
    with pytest.raises(ValueError, match=rf"{name}' line 2 is larger than 1,048,576 bytes; .* record_limit"):
        next(reader)
    assert tracemalloc.get_traced_memory()[1] < 2**27
    tracemalloc.stop()


def test_a_line_of_exactly_the_limit_is_read(tmp_path: Path) -> None:
    assert list(lines(pack(tmp_path / "a", b"12345\n12345"), limit=5)) == [(1, b"12345"), (2, b"12345")]
    for text in (b"123456\n", b"123456"):
        with pytest.raises(ValueError, match="line 1 is larger than 5 bytes"):
            list(lines(pack(tmp_path / "a", text), limit=5))


@pytest.mark.case(31)
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "\xac"}', "'f' line 3 is no UTF-8 .byte 0xac"),
        (b'{"text": null}', "'f' line 3: its field 'text' is no text but null"),
        (b'{"text": 3}', "is no text but int"),
        (b'{"txt": "a"}', "'f' line 3 has no field 'text'; it has 'txt'"),
        (b'{"text": "\\ud800"}', "a lone surrogate at character 0"),
        (b'{"text": "a"', "is no JSON"),
        (b'["text"]', "is no JSON object but list"),
        (b"[" * 100_000, "is no JSON"),
        (b'{"text": 1' + b"1" * 10_000 + b"}", "is no"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(line: bytes, message: str) -> None:
    with pytest.raises(RecordError, match=message) as caught:
        text_of(parse(line, "'f' line 3"), "text", "'f' line 3")
    assert "\n" not in str(caught.value)


def table(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_rows_of_parquet_are_read_with_the_columns_asked_for(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", text=["a", None, "ü"], url=["u", "v", "w"], score=[1.0, 2.0, 3.0])
    found = list(rows(path, ["text"], ["score", "date"]))
    assert found == [(n, {"text": t, "score": n + 1.0}) for n, t in enumerate([b"a", None, "ü".encode()])]
    assert list(rows(path, ["url", "text"]))[2] == (2, {"url": b"w", "text": "ü"})
    large = table(tmp_path / "b.parquet", text=pa.array(["a"], pa.large_string()))
    assert list(rows(large, ["text"])) == [(0, {"text": b"a"})]
    coded = table(tmp_path / "c.parquet", text=pa.array(["a", "a"]).dictionary_encode())
    assert [values["text"] for _, values in rows(coded, ["text"])] == [b"a", b"a"]
    assert list(rows(table(tmp_path / "d.parquet", text=pa.array([], pa.string())), ["text"])) == []


def test_a_parquet_file_of_another_schema_is_refused(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", content=["a"], text=[3])
    with pytest.raises(ValueError, match=r"a.parquet' has no column 'body'; it has 'content', 'text'"):
        list(rows(path, ["body"]))
    with pytest.raises(ValueError, match=r"a.parquet': its column 'text' holds int64 and no text"):
        list(rows(path, ["text"]))
    table(tmp_path / "c.parquet", text=pa.array([b"a", b"\xac"]).view(pa.string()))
    with pytest.raises(ValueError, match=r"c.parquet' is damaged or no parquet file \(Invalid UTF8"):
        list(rows(tmp_path / "c.parquet", ["text"]))
    whole = table(tmp_path / "b.parquet", text=["some text"] * 1000).read_bytes()
    for wrong in (b"", b"no parquet", whole[:-20], whole[:100] + bytes(100) + whole[200:]):
        (tmp_path / "b.parquet").write_bytes(wrong)
        with pytest.raises(ValueError, match=r"b.parquet' is damaged or no parquet file") as caught:
            list(rows(tmp_path / "b.parquet", ["text"]))
        assert "\n" not in str(caught.value)


def test_many_tiny_rows_and_a_large_one_take_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    schema = pa.schema([("text", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for part in range(10):
            writer.write_table(pa.table({"text": [f"{part} {n}" for n in range(20_000)]}, schema=schema))
        writer.write_table(pa.table({"text": ["x" * 2**24]}, schema=schema))
    before, count, longest = pa.total_allocated_bytes(), 0, 0
    peak = 0
    for _, values in rows(path, ["text"]):
        count += 1
        longest = max(longest, len(values["text"]))
        if count % 1000 == 0:
            peak = max(peak, pa.total_allocated_bytes() - before)
    assert (count, longest) == (200_001, 2**24)
    assert peak < 2**24
    with pytest.raises(ValueError, match=r"a.parquet', a row behind row 200000, is larger than 1,048,576 bytes"):
        list(rows(path, ["text"], limit=2**20))


def test_a_large_row_among_small_ones_is_refused_by_its_number(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", text=["a"] * 1000 + ["x" * 5000])
    with pytest.raises(ValueError, match=r"a.parquet' row 1000 is larger than 4,999 bytes"):
        list(rows(path, ["text"], limit=4999))
    assert len(list(rows(path, ["text"], limit=5000))) == 1001


def test_json_is_read_as_it_was_written() -> None:
    record = {"text": "a\n\u2028 漢字 🙂", "score": 1.5}
    assert parse(json.dumps(record).encode(), "a") == record
    assert text_of(record, "text", "a") == record["text"].encode()

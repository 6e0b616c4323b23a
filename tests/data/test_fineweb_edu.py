from __future__ import annotations

import datetime
import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tangolm.data import encoded, fineweb_edu, open_split, pipeline, prepare
from tangolm.data.tokenizer import Gpt2Tokenizer, get_tokenizer
from tests.data.tiny import contents

DUMPS = ("CC-MAIN-2013-20", "CC-MAIN-2020-05", "CC-MAIN-2023-23", "CC-MAIN-2023-50", "CC-MAIN-2024-10")
SPLIT = dict(zip(DUMPS, ("train", "train", "dev", "dev", "test"), strict=True))


def rows(count: int = 200) -> list[dict[str, Any]]:
    """Records of the true schema, the dumps in turn."""
    made = []
    for number in range(count):
        dump = DUMPS[number % len(DUMPS)]
        monday = datetime.date.fromisocalendar(int(dump[8:12]), int(dump[13:]), 1)
        text = f"Document {number} tells of the rivers. " + "They flow to the sea. " * (number % 4)
        stamp = f"CC-MAIN-{monday:%Y%m%d}092621-00000-ip-10-60-113-184.ec2.internal.warc.gz"
        made.append(
            {
                "text": text,
                "id": f"<urn:uuid:{number}>",
                "dump": dump,
                "url": f"http://example.org/{number}",
                "date": f"{monday}T05:48:54Z",
                "file_path": f"s3://commoncrawl/crawl-data/{dump}/segments/1368696381249/warc/{stamp}",
                "language": "en",
                "language_score": 0.97,
                "token_count": 20,
                "score": 3.2,
                "int_score": 3,
            }
        )
    return made


def save(root: Path, records: list[dict[str, Any]]) -> Path:
    """Two parquet files and one of JSON lines."""
    root.mkdir(parents=True, exist_ok=True)
    third = -(-len(records) // 3)
    for number in range(2):
        part = records[number * third : (number + 1) * third]
        pq.write_table(pa.Table.from_pylist(part), root / f"00{number}.parquet", row_group_size=50)
    lines = [json.dumps(record) + "\n" for record in records[2 * third :]]
    (root / "002.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode(), mtime=0))
    return root


def texts(folder: Path, split: str) -> list[str]:
    opened, tokenizer = open_split(folder, split), Gpt2Tokenizer()
    pairs = [opened.row(index) for index in range(opened.rows)]
    stream = np.concatenate([tokens[marks] for tokens, marks in pairs])
    ends = np.flatnonzero(stream == tokenizer.end_token)
    return [tokenizer.decode(piece) for piece in np.split(stream, ends + 1) if len(piece)]


@pytest.mark.parametrize("partition", ["dump", "date", "crawl"])
def test_documents_are_partitioned_by_time(tmp_path: Path, partition: str) -> None:
    records = rows()
    save(tmp_path / "in", records)
    manifest = prepare("fineweb-edu", tmp_path / "in", tmp_path / "out", context=64, partition=partition)
    for split in ("train", "dev", "test"):
        assert texts(tmp_path / "out", split) == [r["text"] for r in records if SPLIT[r["dump"]] == split]
        assert manifest["splits"][split]["sources"][0]["name"] == "fineweb-edu"
    assert (manifest["tokenizer"], manifest["origin"]) == ("gpt2", "local files of the schema")
    assert manifest["passed_over"] == {"empty": 0, "in_gap": 0, "in_training": 0}
    assert manifest["arguments"]["tokens"] == 1_500_000_000


def test_bounds_and_gap(tmp_path: Path) -> None:
    save(tmp_path / "in", rows())
    manifest = prepare(
        "fineweb-edu",
        tmp_path / "in",
        tmp_path / "out",
        context=64,
        train_before="CC-MAIN-2020-05",
        gap_days=1300,
        test_from="CC-MAIN-2024-10",
    )
    counts = {split: manifest["splits"][split]["documents"] for split in ("train", "dev", "test")}
    assert counts == {"train": 40, "dev": 40, "test": 40}
    assert manifest["passed_over"]["in_gap"] == 80


def test_what_training_has_is_dropped_from_the_later_parts_and_counted(tmp_path: Path) -> None:
    records = rows()
    records[2]["url"] = records[0]["url"]  # dev
    records[3]["text"] = records[101]["text"]  # dev; training's comes later in the files
    records[4] |= {"text": records[0]["text"], "url": records[0]["url"]}  # test: dropped once
    records[9]["text"] = records[7]["text"]  # test has a text of dev: it stays
    records[5]["text"] = records[0]["text"]  # training keeps its own copies
    save(tmp_path / "in", records)
    manifest = prepare("fineweb-edu", tmp_path / "in", tmp_path / "out", context=64)
    assert manifest["passed_over"] == {"empty": 0, "in_gap": 0, "in_training": 3}
    for split, dropped in (("train", ()), ("dev", (2, 3)), ("test", (4,))):
        expected = [r["text"] for n, r in enumerate(records) if SPLIT[r["dump"]] == split and n not in dropped]
        assert texts(tmp_path / "out", split) == expected


def test_tokens_end_each_split_exactly(tmp_path: Path) -> None:
    save(tmp_path / "in", rows())
    options = {"context": 64, "tokens": "0.64k", "dev_tokens": 128, "test_tokens": 100}
    manifest = prepare("fineweb-edu", tmp_path / "in", tmp_path / "out", **options)
    for split, rows_, tokens in (("train", 10, 640), ("dev", 2, 128), ("test", 2, 100)):
        opened = open_split(tmp_path / "out", split)
        assert manifest["splits"][split]["rows"] == rows_
        assert sum(int(opened.row(index)[1].sum()) for index in range(rows_)) == tokens


@pytest.mark.parametrize("stop", [10, 150, 210, 333, 399])
def test_an_interrupted_preparation_goes_on(tmp_path: Path, stop: int, monkeypatch: pytest.MonkeyPatch) -> None:
    records = rows()
    records[4]["text"] = records[0]["text"]
    save(tmp_path / "in", records)
    prepare("fineweb-edu", tmp_path / "in", tmp_path / "a", context=64)
    monkeypatch.setattr(pipeline, "JOURNAL_SECONDS", 0.0)
    monkeypatch.setattr(encoded, "CHUNK_ITEMS", 7)
    monkeypatch.setattr("os.fsync", lambda file: None)
    with monkeypatch.context() as patch:
        done = 0
        work = fineweb_edu._work

        def interrupted(item: Any, on_error: str) -> Any:
            nonlocal done
            done += 1
            if done == stop:
                raise KeyboardInterrupt
            return work(item, on_error)

        patch.setattr(fineweb_edu, "_work", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare("fineweb-edu", tmp_path / "in", tmp_path / "b", context=64)
    starts: list[int] = []
    read = fineweb_edu._local
    monkeypatch.setattr(fineweb_edu, "_local", lambda *given: (starts.append(given[-1]), read(*given))[1])
    prepare("fineweb-edu", tmp_path / "in", tmp_path / "b", context=64)
    assert starts[0] == (stop - 1) // 7 * 7 % 203 if stop < 200 else len(starts) == 1
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dump": "2020-05"}, "its 'dump' gives no date for partition='dump'"),
        ({"dump": "CC-MAIN-2021-53"}, "its 'dump' gives no date"),
        ({"dump": None}, "its 'dump' gives no date"),
        ({"url": None}, "its field 'url' is no text but null"),
        ({"text": None}, "its field 'text' is no text but null"),
    ],
)
def test_records_that_cannot_be_used_are_named_or_skipped_and_counted(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    records = rows()
    records[50] |= change
    records[190] |= change
    save(tmp_path / "in", records)
    with pytest.raises(ValueError, match=rf"000.parquet' row 50.*{message}.*on_error='skip'"):
        prepare("fineweb-edu", tmp_path / "in", tmp_path / "out", context=64)
    manifest = prepare("fineweb-edu", tmp_path / "in", tmp_path / "out", context=64, on_error="skip", overwrite=True)
    assert manifest["passed_over"]["bad_records"] == 2
    assert sum(entry["documents"] for entry in manifest["splits"].values()) == 198


def test_a_missing_date_and_a_missing_column_are_named(tmp_path: Path) -> None:
    records = [{name: value for name, value in record.items() if name not in ("date", "url")} for record in rows()]
    save(tmp_path / "in", records)
    with pytest.raises(ValueError, match=r"000.parquet' has no column 'url'"):
        prepare("fineweb-edu", tmp_path / "in", tmp_path / "out", context=64)
    save(tmp_path / "in", [record | {"url": "u"} for record in records])
    with pytest.raises(ValueError, match=r"000.parquet' row 0: its 'date' gives no date"):
        prepare("fineweb-edu", tmp_path / "in", tmp_path / "out", context=64, partition="date", overwrite=True)
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="holds no parquet and no JSON lines"):
        prepare("fineweb-edu", tmp_path / "none", tmp_path / "other")


class Streamed:
    """Stands for the data set on the hub; the network is not in the tests."""

    def __init__(self, records: list[dict[str, Any]], first: int = 0) -> None:
        self.records, self.first = records, first

    def skip(self, count: int) -> Streamed:
        return Streamed(self.records, self.first + count)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.records[self.first :])


def test_the_hub_is_streamed_at_one_commit_that_the_manifest_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, asked = rows(), []

    def load_dataset(*given: Any, **options: Any) -> Streamed:
        asked.append((*given, options))
        return Streamed(records)

    class HfApi:
        def dataset_info(self, name: str, revision: str) -> Any:
            return SimpleNamespace(sha=f"commit of {name} {revision}")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub, "HfApi", HfApi)
    manifest = prepare("fineweb-edu", None, tmp_path / "a", context=64)
    name = "HuggingFaceFW/fineweb-edu"
    assert manifest["revision"] == f"commit of {name} main"
    expected = {"split": "train", "streaming": True, "revision": manifest["revision"]}
    assert asked == [(name, "sample-10BT", expected)] * 2
    save(tmp_path / "in", records)
    local = prepare("fineweb-edu", tmp_path / "in", tmp_path / "b", context=64)
    assert local["splits"] == manifest["splits"]
    assert "datasets" in manifest["versions"]


def test_without_a_network_the_error_names_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class HfApi:
        def dataset_info(self, name: str, revision: str) -> Any:
            raise ConnectionError("no network\nat all")

    monkeypatch.setattr(huggingface_hub, "HfApi", HfApi)
    with pytest.raises(ValueError, match=r"revision 'main' of .* cannot be found .*; or give --source") as caught:
        prepare("fineweb-edu", None, tmp_path / "a")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "a").exists()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"train_before": "2023"}, "train_before must be a date"),
    ({"test_from": "CC-MAIN-2023"}, "test_from must be a date .* got 'CC-MAIN-2023'"),
    ({"test_from": "2023-06-01"}, "test_from must lie behind train_before"),
    ({"gap_days": 400}, "test_from must lie behind train_before and gap_days"),
    ({"partition": "url"}, "partition must be one of"),
    ({"context": 1}, "context must be at least 2"),
    ({"dev_tokens": "many"}, "dev_tokens must be a whole number"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_options_are_refused_by_name(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    save(tmp_path / "in", rows(10))
    with pytest.raises(ValueError, match=message):
        prepare("fineweb-edu", tmp_path / "in", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("dataset", ["fineweb-edu", "text"])
def test_tiny_rows_cost_little_more_than_reading_and_tokenising_them(tmp_path: Path, dataset: str) -> None:
    texts = [f"row {number} of the table" for number in range(100_000)]
    urls, dumps = [f"u/{number}" for number in range(len(texts))], ["CC-MAIN-2023-06", "CC-MAIN-2023-40"] * 49_998
    dumps += ["CC-MAIN-2024-10"] * 4
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": texts, "url": urls, "dump": dumps}), path)
    encoding = get_tokenizer("gpt2")
    encoding.encode_bytes(b"loads it")
    start = time.process_time()
    for text in pq.read_table(path)["text"].to_pylist():
        encoding.encode_bytes(text.encode())
    alone = time.process_time() - start
    start = time.process_time()
    manifest = prepare(dataset, path, tmp_path / "out", workers=1, tokenizer="gpt2")
    ratio = (time.process_time() - start) / alone
    print(f"{dataset} {ratio:.2f}")
    assert ratio < 6  # fineweb-edu reads twice; 1 process of one document each was 12
    assert sum(split["documents"] for split in manifest["splits"].values()) == len(texts)

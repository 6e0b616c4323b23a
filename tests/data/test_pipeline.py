from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangolm.data import Loader, encoded, open_split, pipeline, shards
from tangolm.data.manifest import JOURNAL, SPLITS, read_manifest
from tangolm.data.pipeline import Document, Pass, Worked, write
from tangolm.data.seen import Seen, key
from tests.data.tiny import contents, documents

KILLED = -9


@dataclass(frozen=True)
class Options:
    context: int = 32
    workers: int | None = None


def numbers(start: int, stop: int = 400, wrong: int | None = None, kill: bool = False) -> Iterator[int]:
    for number in range(start, stop):
        if number == wrong:
            if kill:
                os.kill(os.getpid(), 9)
            raise RuntimeError("interrupted")
        yield number


def work(number: int) -> Worked:
    """Some documents of different lengths in all splits, every 7th number without any."""
    if number % 7 == 6:
        return Worked((), {"sevens": 1})
    split = ("dev", "test", *["train"] * 6)[number % 8]
    text = f"number {number} " * (number % 5 + 1)
    return Worked((Document(split, f"part {number % 2}", text.encode()), Document("train", "rest", b"always")))


def prepare(out: Path, **options: Any) -> dict[str, Any]:
    return write(
        out,
        "numbers",
        Options(),
        **{
            "items": numbers,
            "work": work,
            "weigh": lambda item: 8,
            "tokenizer": "bytes",
            "document_masking": False,
            **options,
        },
    )


def texts(folder: Path, split: str) -> list[bytes]:
    opened = open_split(folder, split)
    rows = [opened.row(index) for index in range(opened.rows)]
    stream = np.concatenate([tokens[marks] for tokens, marks in rows])
    return bytes(np.where(stream == 256, 0, stream).tolist()).removesuffix(b"\0").split(b"\0")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SHARD_TOKENS", 32 * 20)
        prepare(out, workers=1)
    return out


@pytest.fixture(autouse=True)
def small_shards_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoded, "CHUNK_ITEMS", 1)
    monkeypatch.setattr(os, "fsync", lambda file: None)  # a journal an item would wait for the disk most of the time
    monkeypatch.setattr(shards, "SHARD_TOKENS", 32 * 20)


@pytest.mark.case(33)
def test_the_stream_is_the_documents_in_the_order_of_the_items(whole: Path) -> None:
    made = [work(number) for number in range(400)]
    for split in ("train", "dev", "test"):
        assert texts(whole, split) == [d.text for one in made for d in one.documents if d.split == split]
    manifest = read_manifest(whole)
    assert manifest["passed_over"] == {"sevens": 57}
    assert len(manifest["splits"]["train"]["shards"]) > 5
    assert sum(source["documents"] for source in manifest["splits"]["train"]["sources"]) == len(texts(whole, "train"))
    assert sorted(path.name for path in whole.iterdir() if not path.name.endswith(".npy")) == ["manifest.json"]


@pytest.mark.slow
def test_two_processes_give_the_same_bytes(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "ALONE", 0)
    monkeypatch.setattr(encoded, "CHUNK_ITEMS", 13)
    prepare(tmp_path, workers=2)
    assert contents(tmp_path) == contents(whole)


@pytest.mark.parametrize("wrong", [0, 1, 77, 399])
def test_an_interrupted_preparation_goes_on(
    tmp_path: Path, whole: Path, wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "JOURNAL_SECONDS", 0.0)
    starts = []
    for stop in sorted({wrong, 200, 390}):
        with pytest.raises(RuntimeError):
            prepare(tmp_path, items=partial(numbers, wrong=stop), workers=1)
        assert not (tmp_path / "manifest.json").exists()

    def noted(start: int) -> Iterator[int]:
        starts.append(start)
        return numbers(start)

    prepare(tmp_path, items=noted, workers=1)
    assert starts == [max(wrong, 390)]
    assert contents(tmp_path) == contents(whole)


@pytest.mark.slow
def test_a_killed_preparation_goes_on(tmp_path: Path, whole: Path) -> None:
    script = f"""
from functools import partial
from pathlib import Path
from tangolm.data import encoded, pipeline, shards
from tests.data import test_pipeline
if __name__ == "__main__":
    shards.SHARD_TOKENS = 32 * 20
    pipeline.JOURNAL_SECONDS, pipeline.ALONE, encoded.CHUNK_ITEMS = 0.0, 0, 5
    test_pipeline.prepare(Path({str(tmp_path)!r}), items=partial(test_pipeline.numbers, wrong=300, kill=True), workers=2)
"""
    path = tmp_path.with_name(tmp_path.name + ".py")
    path.write_text(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, path], env=environment, timeout=100, check=False).returncode == KILLED
    assert (tmp_path / JOURNAL).is_file()
    with pytest.raises(ValueError, match="is half-written"):
        read_manifest(tmp_path)
    starts = []

    def noted(start: int) -> Iterator[int]:
        starts.append(start)
        return numbers(start)

    prepare(tmp_path, items=noted, workers=1)
    assert starts[0] > 0
    assert contents(tmp_path) == contents(whole)


def test_another_plan_is_refused_by_name_unless_overwritten(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "JOURNAL_SECONDS", 0.0)
    with pytest.raises(RuntimeError):
        prepare(tmp_path, items=partial(numbers, wrong=300), workers=1)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="whose document_masking was false and is now true"):
        prepare(tmp_path, document_masking=True)
    with pytest.raises(ValueError, match='whose source was null and is now "other"'):
        prepare(tmp_path, identity="other")
    assert contents(tmp_path) == before
    prepare(tmp_path, identity="other", overwrite=True)
    assert contents(tmp_path) == contents(whole)
    with pytest.raises(ValueError, match="already holds"):
        prepare(tmp_path)


def test_a_damaged_journal_or_shard_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "JOURNAL_SECONDS", 0.0)
    with pytest.raises(RuntimeError):
        prepare(tmp_path, items=partial(numbers, wrong=390), workers=1)
    shard = tmp_path / "train-00001.tokens.npy"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + b"x")
    with pytest.raises(ValueError, match=r"train-00001.tokens.npy' is damaged"):
        prepare(tmp_path)
    shard.write_bytes(whole)
    (tmp_path / JOURNAL).write_bytes(b"half")
    with pytest.raises(ValueError, match=r"journal .* is damaged"):
        prepare(tmp_path)


@pytest.mark.parametrize("program", ["import tangolm.data", "import tangolm.cli"])
def test_the_processes_of_a_preparation_need_no_torch(program: str) -> None:
    """What a new interpreter imports before it works: the module of `work`, and that of the command that was given."""
    script = f"import sys; {program}; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", script], env=environment, timeout=100, check=False).returncode == 0


def pairs(start: int, split: str, read: list[int] | None = None) -> Iterator[tuple[str, int]]:
    for number in range(start, 400):
        if read is not None:
            read.append(number)
        yield split, number


def small(item: tuple[str, int]) -> Worked:
    """One document an item, named by its split and number."""
    split, number = item
    return Worked((Document(split, "a", f"{split} {number}".encode()),))


@pytest.mark.parametrize("limit", [1, 31, 32, 33, 640, *range(1000, 1012), 3800])
def test_a_split_stops_exactly_at_its_limit(tmp_path: Path, limit: int) -> None:
    read: list[int] = []
    passes = [Pass(partial(pairs, split=split, read=read if split == "train" else None), (split,)) for split in SPLITS]
    entry = prepare(tmp_path, items=passes, work=small, limits={"train": limit}, workers=1)["splits"]["train"]
    assert entry["rows"] == -(-limit // 32)
    opened = open_split(tmp_path, "train")
    rows = [opened.row(index) for index in range(opened.rows)]
    marks = np.concatenate([marks for _, marks in rows])
    assert marks.sum() == limit
    assert marks[:limit].all()
    stream = b"".join(f"train {number}".encode() + b"\0" for number in range(400))[:limit]
    assert texts(tmp_path, "train") == stream.removesuffix(b"\0").split(b"\0")
    assert entry["documents"] == len(texts(tmp_path, "train"))
    assert entry["bytes"] == len(stream.replace(b"\0", b""))
    assert len(read) <= entry["documents"] + 1  # what lies behind the end is not read


@pytest.mark.slow
def test_limits_end_alike_with_any_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = [Pass(partial(pairs, split=split), (split,)) for split in SPLITS]
    limits = {"train": 1000, "dev": 100, "test": 64}
    prepare(tmp_path / "a", items=passes, work=small, limits=limits, workers=1)
    monkeypatch.setattr(pipeline, "ALONE", 0)
    monkeypatch.setattr(encoded, "CHUNK_ITEMS", 7)
    seen: list[tuple[int, int]] = []
    prepare(
        tmp_path / "b",
        items=passes,
        work=small,
        limits=limits,
        workers=2,
        progress=lambda done, total, text: seen.append((done, total)),
    )
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert seen == sorted(seen)
    assert seen[-1] == (1164, 1164)


def question(number: int) -> Worked:
    prompt, answer = f"{number}+{number}=\n".encode(), str(2 * number).encode() * (20 if number == 100 else 1)
    split, source = ("train", "dev", "test")[number % 3], "small" if number < 200 else "large"
    return Worked((Document(split, source, prompt + answer, prompt=len(prompt)),))


@pytest.mark.parametrize("whole_documents", [True, False])
def test_prompts_are_not_supervised_and_sources_have_rows_of_their_own(tmp_path: Path, whole_documents: bool) -> None:
    manifest = prepare(
        tmp_path, work=question, document_masking=True, whole_documents=whole_documents, by_source=True, workers=1
    )
    assert manifest["passed_over"] == ({"too_long": 1} if whole_documents else {})
    for number, split in enumerate(SPLITS):
        expected = [question(n).documents[0] for n in range(number, 400, 3) if not (whole_documents and n == 100)]
        opened = open_split(tmp_path, split)
        if whole_documents:
            assert documents(opened) == [(d.text[: d.prompt], d.text[d.prompt :]) for d in expected]
        entry = manifest["splits"][split]
        answers = [d.text[d.prompt :] for d in expected]
        assert entry["bytes_per_token"] == sum(map(len, answers)) / sum(len(answer) + 1 for answer in answers)
        small, large = entry["sources"]
        assert (small["name"], large["name"]) == ("small", "large")
        if split == "train":
            assert small["rows"] is None
        else:
            assert small["rows"][1] == large["rows"][0]
            assert (small["rows"][0], large["rows"][1]) == (0, entry["rows"])
            tokens, marks = opened.row(large["rows"][0])
            assert bytes(tokens[:3].tolist()) in (b"200", b"201", b"202")
            assert not marks[:8].any()


def copied(number: int) -> Worked:
    text = f"text {number % 100}".encode()
    if number < 200:
        return Worked((Document("train", "a", text, notes=(key(text),)),))
    text = f"text {number - 150}".encode()
    return Worked(tuple(Document(split, "a", text, unless=(key(text),)) for split in ("dev", "test")))


def test_copies_of_noted_documents_are_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path / "a", work=copied, workers=1)
    manifest = read_manifest(tmp_path / "a")
    assert manifest["passed_over"] == {"copies": 2 * 50}
    assert manifest["splits"]["train"]["documents"] == 200
    assert texts(tmp_path / "a", "dev") == [f"text {number}".encode() for number in range(100, 250)]
    monkeypatch.setattr(pipeline, "JOURNAL_SECONDS", 0.0)
    for stop in (50, 150, 210, 300):
        with pytest.raises(RuntimeError):
            prepare(tmp_path / "b", work=copied, items=partial(numbers, wrong=stop), workers=1)
    prepare(tmp_path / "b", work=copied, workers=1)
    assert contents(tmp_path / "b") == contents(tmp_path / "a")


def test_keys_of_what_is_done_again_are_not_taken_for_copies(tmp_path: Path) -> None:
    seen = Seen(tmp_path, 0)
    seen.note({1: 3, -5: 3})
    seen.note({1: 4, 2: 4})
    seen.save()
    seen.close()
    seen = Seen(tmp_path, 4)  # the journal is older than the keys: step 4 comes again
    assert seen.known([2, 1, 7, -5, *range(10, 2000)]) == {1, -5}
    seen.remove()
    assert not list(tmp_path.iterdir())


def parts(number: int) -> Worked:
    split = ("train", "dev", "test")[number // 8 % 3]
    return Worked((Document(split, "a", f"{number} ".encode(), ends=number % 8 == 7),))


def test_a_document_may_come_in_parts(tmp_path: Path) -> None:
    prepare(tmp_path, work=parts, workers=1)
    for index, split in enumerate(SPLITS):
        whole = [b"".join(b"%d " % n for n in range(first, first + 8)) for first in range(8 * index, 400, 24)]
        assert texts(tmp_path, split) == whole


def never(number: int) -> Worked:
    return Worked((Document("train", "a", b"text"),))


def test_an_empty_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="split 'dev' would be empty: of 400 items of numbers none came to it"):
        prepare(tmp_path, work=never, workers=1)


def failing(number: int) -> Worked:
    if number == 333:
        raise ValueError(f"line {number} is wrong")
    if number == 334:
        os._exit(3)
    return work(number)


@pytest.mark.slow
def test_what_work_raises_comes_out_and_a_dead_worker_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "ALONE", 0)
    with pytest.raises(ValueError, match="line 333 is wrong"):
        prepare(tmp_path / "a", work=failing, items=partial(numbers, stop=334), workers=2)
    with pytest.raises(ValueError, match="a worker process died while preparing numbers"):
        prepare(tmp_path / "b", work=failing, items=lambda start: iter([334]), workers=2)


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 40),
    batch=st.integers(1, 9),
    epochs=st.integers(1, 3),
    world=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_each_window_is_read_exactly_once_an_epoch(
    whole: Path, rows: int, batch: int, epochs: int, world: int, seed: int
) -> None:
    split = open_split(whole, "train")
    split.rows = rows
    loader = Loader(split, batch, seed)
    read: list[int] = []
    while len(read) < rows * epochs:
        share = [range(len(read) + rank, min(len(read) + batch, rows * epochs), world) for rank in range(world)]
        ranks = [loader.row_of(sample) for part in share for sample in part]
        assert sorted(ranks) == sorted(
            loader.batch(len(read), min(batch, rows * epochs - len(read))).sample_ids.tolist()
        )
        read += loader.batch(len(read), min(batch, rows * epochs - len(read))).sample_ids.tolist()
    for epoch in range(epochs):
        assert sorted(read[epoch * rows : (epoch + 1) * rows]) == list(range(rows))

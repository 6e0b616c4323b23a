"""FineWeb-Edu (Penedo et al. 2024), partitioned by time: training before a bound, development and test after it.

Streamed from the hub, or read from parquet and JSON lines of the same schema. The source is read twice: first for
training, then for development and test, whose documents are dropped where their url or text is one of training's.
"""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tangolm.config import suggest
from tangolm.data.pipeline import Document, Pass, Worked, write
from tangolm.data.records import (
    JSON_LINES,
    PARQUET,
    RECORD_LIMIT,
    RecordError,
    Where,
    lines,
    parse,
    rows,
    suffix,
    text_of,
)
from tangolm.data.seen import key
from tangolm.data.source import Progress, at_least, check_context, existing, no_progress, option, whole_number
from tangolm.data.tokenizer import CHOICES, get_tokenizer

NAME = "fineweb-edu"
REPOSITORY = "HuggingFaceFW/fineweb-edu"
HELD_OUT = ("dev", "test")
FIELDS = {"dump": "dump", "date": "date", "crawl": "file_path"}  # where each partition finds its date
_DUMP = re.compile(r"CC-MAIN-(\d{4})-(\d{2})")
_STAMP = re.compile(r"CC-MAIN-(\d{8})\d{6}-")


@dataclass(frozen=True)
class FineWebEduOptions:
    """Options of `prepare fineweb-edu`. A bound is a date (2023-06-01) or a dump (CC-MAIN-2023-23: the week's Monday)."""

    context: int = option(8192, "tokens a row, at least 2")
    tokenizer: str = option("gpt2", CHOICES)
    tokens: str | int | None = option("1.5B", "end training after exactly so many tokens")
    dev_tokens: str | int | None = option("10M", "end development after exactly so many tokens")
    test_tokens: str | int | None = option("10M", "end the test after exactly so many tokens")
    partition: Literal["dump", "date", "crawl"] = option(
        "dump", "a document's date: dump (its week), date (that column) or crawl (the stamp in file_path)"
    )
    train_before: str = option("2023-06-01", "training is what is older than this date or dump")
    test_from: str = option("2024-01-01", "the test begins at this date or dump, development is what lies before it")
    gap_days: int = option(0, "leave out so many days from train_before on")
    config: str = option("sample-10BT", "the data set's configuration, where it is streamed")
    revision: str = option("main", "the data set's revision, where it is streamed; its commit is kept in the manifest")
    document_masking: bool = option(False, "keep documents in a row from seeing each other")
    on_error: Literal["fail", "skip"] = option("fail", "what a record that cannot be used does; skip counts it")
    record_limit: str | int = option(RECORD_LIMIT, "refuse a line or row of more bytes")
    workers: int | None = option(None, "processes that tokenise; one a core where not given")

    def __post_init__(self) -> None:
        check_context(self.context, 2)
        at_least(1, workers=self.workers)
        at_least(0, gap_days=self.gap_days)
        get_tokenizer(self.tokenizer)
        for name in ("tokens", "dev_tokens", "test_tokens", "record_limit"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole_number(value, name))
        for name, known in (("partition", tuple(FIELDS)), ("on_error", ("fail", "skip"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is not known{suggest(getattr(self, name), known)}")
        bound, test = _bound(self.train_before, "train_before"), _bound(self.test_from, "test_from")
        if bound + datetime.timedelta(days=self.gap_days) >= test:
            raise ValueError(
                f"test_from must lie behind train_before and gap_days, got {self.test_from} "
                f"behind {self.train_before} and {self.gap_days} days"
            )


class _Row(NamedTuple):
    where: str | Where
    values: Mapping[str, Any]
    split: str


class _Fault(NamedTuple):
    """A record that cannot be used, or one that belongs to no split: what to count it as."""

    name: str
    error: str | None = None


def prepare(
    source: str | Path | None,
    out: str | Path,
    options: FineWebEduOptions | None = None,
    progress: Progress = no_progress,
    *,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Prepare FineWeb-Edu in `out`: streamed, or from `source`, a file or folder of parquet and JSON lines.

    Returns:
        The manifest; its `passed_over` counts empty documents, those of the gap, and those of development and test that
        training has ("in_training").

    Raises:
        ValueError: an option, a source or a folder that cannot be used; a record that cannot where they are not skipped;
            a split that would be empty.
    """
    options = options or FineWebEduOptions()
    facts: dict[str, Any] = {"generated": False}
    if source is None:
        revision = _commit(options)
        read = partial(_streamed, options, revision)
        facts |= {"origin": f"{REPOSITORY} {options.config}", "revision": revision}
        identity = None
    else:
        root = existing(source, NAME)
        files = _files(root)
        read = partial(_local, files, options)
        facts |= {"origin": "local files of the schema"}
        about = [(path.relative_to(root).as_posix(), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        identity = hashlib.sha256(repr(about).encode()).hexdigest()
    return write(
        out,
        NAME,
        options,
        items=[
            Pass(partial(_items, read, options, ("train",)), ("train",)),
            Pass(partial(_items, read, options, HELD_OUT), HELD_OUT),
        ],
        work=partial(_work, on_error=options.on_error),
        weigh=_weight,
        tokenizer=options.tokenizer,
        document_masking=options.document_masking,
        workers=options.workers,
        limits={"train": options.tokens, "dev": options.dev_tokens, "test": options.test_tokens},  # pyright: ignore[reportArgumentType]
        copies="in_training",
        passed_over={"empty": 0, "in_gap": 0, "in_training": 0},
        identity=identity,
        packages=["datasets"] if source is None else [],
        facts=facts,
        progress=progress,
        overwrite=overwrite,
    )


def _bound(text: str, name: str) -> datetime.date:
    try:
        return _week(text) if text.startswith("CC-") else datetime.date.fromisoformat(text)
    except ValueError as error:
        raise ValueError(
            f"{name} must be a date such as 2023-06-01 or a dump such as CC-MAIN-2023-23, got {text!r}"
        ) from error


@lru_cache(maxsize=1024)
def _week(dump: str) -> datetime.date:
    match = _DUMP.fullmatch(dump)
    if match is None:
        raise ValueError(f"{dump!r} is no dump CC-MAIN-YYYY-WW")
    return datetime.date.fromisocalendar(int(match[1]), int(match[2]), 1)


def _date(values: Mapping[str, Any], partition: str, where: str | Where) -> datetime.date:
    """The date that decides a document's split.

    Raises:
        RecordError: it has none that can be read.
    """
    field = FIELDS[partition]
    value = values.get(field)
    try:
        if partition == "dump":
            return _week(value) if isinstance(value, str) else _none(value)
        if partition == "crawl":
            match = _STAMP.search(value) if isinstance(value, str) else None
            return datetime.date.fromisoformat(match[1]) if match is not None else _none(value)
        return datetime.date.fromisoformat(str(value)[:10])  # a text, or a time that parquet holds
    except ValueError as error:
        raise RecordError(
            f"source {where}: its {field!r} gives no date for partition={partition!r} ({error})"
        ) from error


def _none(value: Any) -> datetime.date:
    raise ValueError(f"it is {str(value)[:100]!r}")


def _items(
    read: Any, options: FineWebEduOptions, splits: tuple[str, ...], start: int
) -> Iterator[_Row | _Fault | None]:
    """An item a record, None where another pass takes it; what belongs to no split comes in the pass of training."""
    bound, test = _bound(options.train_before, "train_before"), _bound(options.test_from, "test_from")
    after = bound + datetime.timedelta(days=options.gap_days)
    for where, values in read(start):
        item: _Row | _Fault | None = None
        try:
            if isinstance(values, RecordError):
                raise values
            date = _date(values, options.partition, where)
            split = "train" if date < bound else "gap" if date < after else "dev" if date < test else "test"
            if split in splits:
                item = _Row(where, {name: values[name] for name in ("text", "url") if name in values}, split)
            elif split == "gap" and "train" in splits:
                item = _Fault("in_gap")
        except RecordError as error:
            if "train" in splits:
                item = _Fault("bad_records", str(error))
        yield item


def _weight(item: _Row | _Fault | None) -> int:
    text = item.values.get("text") if isinstance(item, _Row) else None
    return len(text) if isinstance(text, str | bytes) else 0


def _work(item: _Row | _Fault | None, on_error: str) -> Worked:
    if item is None:
        return Worked(())
    try:
        if isinstance(item, _Fault):
            if item.error is not None:
                raise RecordError(item.error)
            return Worked((), {item.name: 1})
        text, url = text_of(item.values, "text", item.where), text_of(item.values, "url", item.where)
    except RecordError as error:
        if on_error == "skip":
            return Worked((), {"bad_records": 1})
        raise ValueError(f"{error}; mend it, or pass over such records with on_error='skip'") from error
    if not text:
        return Worked((), {"empty": 1})
    keys = (key(b"url " + url), key(b"text " + text))
    if item.split == "train":
        return Worked((Document("train", NAME, text, notes=keys),))
    return Worked((Document(item.split, NAME, text, unless=keys),))


_Record = tuple[str | Where, Mapping[str, Any] | RecordError]  # where it stands, and what it holds


def _files(root: Path) -> list[Path]:
    found = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
    kept = [
        path
        for path in found
        if suffix(path) in (*JSON_LINES, PARQUET)
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
    if not kept:
        raise ValueError(
            f"source {str(root)!r} holds no parquet and no JSON lines (.parquet, .jsonl, .jsonl.gz, .jsonl.zst)"
        )
    return kept


def _local(files: list[Path], options: FineWebEduOptions, start: int) -> Iterator[_Record]:
    return islice(_records(files, options), start, None)


def _records(files: list[Path], options: FineWebEduOptions) -> Iterator[_Record]:
    limit, field = int(options.record_limit), FIELDS[options.partition]
    for path in files:
        if suffix(path) == PARQUET:
            texts = ["text", "url", *([] if field == "date" else [field])]
            for number, values in rows(path, texts, ["date"] if field == "date" else [], limit):
                yield Where(path, "row", number), values
        else:
            for number, line in lines(path, limit):
                where = Where(path, "line", number)
                try:
                    yield where, parse(line, where)
                except RecordError as error:
                    yield where, error


def _commit(options: FineWebEduOptions) -> str:
    """The commit that a revision of the data set is at."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ValueError(_missing()) from error
    try:
        commit = HfApi().dataset_info(REPOSITORY, revision=options.revision).sha
    except Exception as error:  # of many kinds: no network, no such revision
        text = str(error).splitlines()[0] if str(error) else ""
        raise ValueError(
            f"revision {options.revision!r} of {REPOSITORY} cannot be found ({type(error).__name__}: {text}); "
            "or give --source with local files of it"
        ) from error
    assert commit is not None
    return commit


def _streamed(options: FineWebEduOptions, revision: str, start: int) -> Iterator[_Record]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(_missing()) from error
    stream: Iterable[Any] = load_dataset(
        REPOSITORY, options.config, split="train", streaming=True, revision=revision
    ).skip(start)
    for number, values in enumerate(stream, start):
        yield f"{REPOSITORY} {options.config} row {number}", values


def _missing() -> str:
    return "streaming needs the package datasets; pip install 'tangolm[data]', or give --source with local files"

"""Rows of The Stack as repositories with the files that are wanted, from parquet parts here or on the Hugging Face hub.

Version 3 has one row a repository: `repo_path, files[]: content, file_path, language, license_type, detected_licenses,
is_vendor`. Versions 1 and 2 (with contents) have one row a file, with the names that `FIELDS` lists. Metadata decides which
files are wanted, and only their contents leave the part's buffers.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

BATCH_BYTES, BATCH_ROWS = 2**22, 512  # of a part that are decoded together, on average and at most
MOST = 2**26  # bytes of one repository that are kept, so that memory is bounded
REPOSITORY = ("repo_path", "repo_name", "max_stars_repo_name")
FIELDS = {  # what is read of a file, and its name in versions 3, 2 and 1
    "content": ("content",),
    "language": ("language", "lang"),
    "license_type": ("license_type",),
    "licenses": ("detected_licenses", "max_stars_repo_licenses"),
    "vendored": ("is_vendor",),
    "generated": ("is_generated",),
}
TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)


@dataclass(frozen=True)
class Wanted:
    """Which files are wanted; names are compared without regard to case.

    Args:
        languages: of these only; any where empty.
        licenses: whose kind of licence or one of whose licences is among these; any where empty.
        vendored: vendored and generated files too.
        max_bytes: at most so many bytes of content.
    """

    languages: frozenset[str]
    licenses: frozenset[str]
    vendored: bool
    max_bytes: int

    def passes_over(self, facts: Mapping[str, Any], size: int | None) -> str | None:
        """Why a file is not wanted, as a name to count it under; None where it is.

        Args:
            facts: its fields by the keys of `FIELDS`, but for the content.
            size: bytes of the content; None where it has none.
        """
        if size is None:
            return "without_content"
        if self.languages and str(facts.get("language")).lower() not in self.languages:
            return "other_language"
        if self.licenses:
            names = [facts.get("license_type"), *(facts.get("licenses") or ())]
            if not any(str(name).lower() in self.licenses for name in names if name):
                return "other_license"
        if not self.vendored and facts.get("vendored"):
            return "vendored"
        if not self.vendored and facts.get("generated"):
            return "generated"
        return "too_large" if size > self.max_bytes else None


@dataclass(frozen=True)
class Repository:
    """A row: the repository's name, (language, content) of each file wanted, and counts of those passed over."""

    name: str
    files: tuple[tuple[str, bytes], ...]
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Schema:
    """Where a part has what is read.

    Args:
        repository: the column with the repository's name.
        nested: whether a row has `files`, rather than being one file.
        fields: the name of each of `FIELDS` that is there.
        missing: those that are not there.
        unknown: fields that are there and not read.
    """

    repository: str
    nested: bool
    fields: dict[str, str]
    missing: tuple[str, ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True)
class Parts:
    """Parquet parts by name, in the order in which they are read, and how to open one."""

    names: tuple[str, ...]
    open: Callable[[str], BinaryIO]

    def permuted(self, seed: int) -> Parts:
        """The parts in an order that the seed draws: in version 3 they are sorted by the repositories' names."""
        return Parts(tuple(sorted(self.names, key=lambda name: _digest(f"{seed}:{name}"))), self.open)

    def schema(self, wanted: Wanted) -> Schema:
        """The schema of the first part.

        Raises:
            ValueError: it is no parquet, or lacks what is needed; the part and the field are named.
        """
        with self.open(self.names[0]) as file:
            return _schema(_parquet(file, self.names[0]), self.names[0], wanted)

    def repositories(self, wanted: Wanted, start: int = 0) -> Iterator[Repository]:
        """The rows of all parts from number `start` on; parts and row groups before it are not decoded.

        Raises:
            ValueError: a part that cannot be read, by name.
        """
        for name in self.names:
            with self.open(name) as file:
                part = _parquet(file, name)
                schema = _schema(part, name, wanted)
                rows = part.metadata.num_rows
                if start < rows:
                    yield from islice(_repositories(part, name, schema, wanted, start), rows - start)
                start = max(0, start - rows)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def _parquet(file: BinaryIO, name: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file, pre_buffer=False, buffer_size=2**20)
    except Exception as error:  # pyarrow's, or of the network
        raise ValueError(f"part {name!r} is no parquet that can be read: {error}") from error


def _schema(part: pq.ParquetFile, name: str, wanted: Wanted) -> Schema:
    columns = part.schema_arrow
    nested = "files" in columns.names
    inner = columns
    if nested:
        kind = columns.field("files").type
        if not ((pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_struct(kind.value_type)):
            raise ValueError(f"part {name!r}: files is {kind}, but must be a list of structs")
        inner = pa.schema(list(kind.value_type))
    repository = next((field for field in REPOSITORY if field in columns.names), None)
    if repository is None:
        raise ValueError(f"part {name!r} has none of {', '.join(REPOSITORY)}; it has {', '.join(columns.names)}")
    fields = {
        key: next(name for name in names if name in inner.names)
        for key, names in FIELDS.items()
        if any(name in inner.names for name in names)
    }
    if "content" not in fields:
        raise ValueError(
            f"part {name!r} has no content, only {', '.join(inner.names)}: where rows are mere ids (as The Stack v2 is "
            "published), take a copy with contents"
        )
    if not any(is_text(inner.field("content").type) for is_text in TEXTS):
        raise ValueError(f"part {name!r}: content is {inner.field('content').type}, but must be text")
    for key, needed in (("language", wanted.languages), ("license_type", wanted.licenses)):
        if needed and key not in fields and not (key == "license_type" and "licenses" in fields):
            names = " or ".join(FIELDS[key] + (FIELDS["licenses"] if key == "license_type" else ()))
            raise ValueError(f"part {name!r} has no {names}, so files cannot be chosen by it; leave that option out")
    read = {repository, "files", *fields.values()}
    unknown = [field for field in columns.names if field not in read]
    unknown += [f"files.{field}" for field in inner.names if nested and field not in read]
    return Schema(repository, nested, fields, tuple(key for key in FIELDS if key not in fields), tuple(unknown))


def _repositories(part: pq.ParquetFile, name: str, schema: Schema, wanted: Wanted, start: int) -> Iterator[Repository]:
    group = 0
    while start >= (rows := part.metadata.row_group(group).num_rows):
        start, group = start - rows, group + 1
    total = sum(part.metadata.row_group(index).total_byte_size for index in range(part.num_row_groups))
    size = max(1, min(BATCH_ROWS, BATCH_BYTES * part.metadata.num_rows // max(1, total)))
    columns = [schema.repository, "files"] if schema.nested else [schema.repository, *schema.fields.values()]
    try:
        for batch in part.iter_batches(size, row_groups=list(range(group, part.num_row_groups)), columns=columns):
            if start < len(batch):
                yield from _of_batch(batch.slice(start), schema, wanted)
            start = max(0, start - len(batch))
    except Exception as error:  # pyarrow's, or of the network
        raise ValueError(f"part {name!r} cannot be read on: {error}; run again to go on behind what is done") from error


def _of_batch(batch: pa.RecordBatch, schema: Schema, wanted: Wanted) -> Iterator[Repository]:
    names = batch.column(schema.repository).to_pylist()
    arrays, lengths = {name: batch.column(name) for name in batch.schema.names}, [1] * len(batch)
    if schema.nested:
        files = batch.column("files")
        lengths = [length or 0 for length in files.value_lengths().to_pylist()]
        structs = files.flatten()
        arrays = dict(zip([field.name for field in structs.type], structs.flatten(), strict=True))
    content = arrays[schema.fields["content"]]
    sizes = pc.call_function("binary_length", [content]).to_pylist()
    facts = {key: arrays[field].to_pylist() for key, field in schema.fields.items() if key != "content"}
    first = 0
    for name, length in zip(names, lengths, strict=True):
        counts: Counter[str] = Counter()
        kept, held = [], 0
        for index in range(first, first + length):
            own = {key: values[index] for key, values in facts.items()}
            why = wanted.passes_over(own, sizes[index])
            if why is None and held + sizes[index] > MOST:
                why = "too_large_repository"
            if why is not None:
                counts[why] += 1
                continue
            held += sizes[index]
            kept.append((str(own.get("language") or "unknown"), content[index].as_buffer().to_pybytes()))
        first += length
        yield Repository(str(name), tuple(kept), counts)

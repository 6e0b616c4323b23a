"""Rows of The Stack from parquet parts, on this machine or elsewhere: what needs pyarrow.

Metadata decides which files are wanted, and only their contents leave the part's buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tangolm.data.stack_rows import Repository, Schema, Wanted, gather, schema_of

BATCH_BYTES, BATCH_ROWS = 2**22, 512  # of a part that are decoded together, on average and at most
TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)


@dataclass(frozen=True)
class Parts:
    """Parquet parts by name, in the order in which they are read, and how to open one."""

    names: tuple[str, ...]
    open: Callable[[str], BinaryIO]

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


def _parquet(file: BinaryIO, name: str) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file, pre_buffer=False, buffer_size=2**20)
    except Exception as error:  # pyarrow's, or of the network
        raise ValueError(f"part {name!r} is no parquet that can be read: {error}") from error


def _schema(part: pq.ParquetFile, name: str, wanted: Wanted) -> Schema:
    row = file = part.schema_arrow
    if "files" in row.names:
        kind = row.field("files").type
        if not ((pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_struct(kind.value_type)):
            raise ValueError(f"part {name!r}: files is {kind}, but must be a list of structs")
        file = pa.schema(list(kind.value_type))
    schema = schema_of(f"part {name!r}", row.names, file.names, wanted)
    if not any(is_text(file.field("content").type) for is_text in TEXTS):
        raise ValueError(f"part {name!r}: content is {file.field('content').type}, but must be text")
    return schema


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
        files = (
            (
                {key: values[at] for key, values in facts.items()},
                sizes[at],
                lambda at=at: content[at].as_buffer().to_pybytes(),
            )
            for at in range(first, first + length)
        )
        yield gather(str(name), files, wanted)
        first += length

"""Records read from files: JSON lines and the rows of parquet, and any file under gzip or zstandard; in bounded memory.

A fault of one record is a `RecordError`, which a data set may skip and count; a fault of a file is a ValueError.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

BOM = b"\xef\xbb\xbf"
JSON_LINES, PARQUET = (".jsonl", ".ndjson"), ".parquet"
PACKED = (".gz", ".zst")
RECORD_LIMIT = 2**28  # bytes of a record unless asked otherwise
_BATCH_BYTES, _BATCH_ROWS = 2**23, 4096
_ZSTD_READ = 2**11  # a block of 128 KiB takes 4 bytes at least: so much unpacks to 64 MiB at most
_ZSTD_WINDOW = 2**27  # the largest that the command zstd unpacks unasked


class RecordError(ValueError):
    """A record that cannot be used; the file and the line or row are named."""


class Where(NamedTuple):
    """A record's file, and its line or row there; written as a text only where it is needed, which is seldom."""

    file: Path
    unit: str
    number: int

    def __str__(self) -> str:
        return f"{str(self.file)!r} {self.unit} {self.number}"


def suffix(path: Path) -> str:
    """The ending that says what a file holds: that before `.gz` or `.zst`."""
    return Path(path.stem).suffix if path.suffix in PACKED else path.suffix


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A file as bytes, unpacked on the way.

    Raises:
        ValueError: it cannot be read, or is damaged or cut; the package zstandard is missing.
    """
    try:
        with path.open("rb") as file:
            if path.suffix == ".gz":
                with gzip.open(file) as stream:
                    yield stream  # pyright: ignore[reportReturnType]
            elif path.suffix == ".zst":
                yield io.BufferedReader(_Zstandard(file, path), 2**16)
            else:
                yield file
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"source {str(path)!r} cannot be read or is damaged ({error})") from error


def lines(path: Path, limit: int = RECORD_LIMIT) -> Iterator[tuple[int, bytes]]:
    """(number from 1, bytes) of each line that is not blank, its line end and a byte order mark left out.

    Raises:
        ValueError: as `opened`; a line longer than `limit` bytes.
    """
    with opened(path) as stream:
        number = 0
        while line := stream.readline(limit + 2):
            number += 1
            if len(line) > limit + 1 or (len(line) > limit and not line.endswith(b"\n")):
                raise ValueError(_too_large(f"{str(path)!r} line {number}", limit))
            if number == 1:
                line = line.removeprefix(BOM)
            if not line.isspace() and line:
                yield number, line.rstrip(b"\r\n")


def parse(line: bytes, where: str | Where) -> dict[str, Any]:
    """The object of a line of JSON.

    Raises:
        RecordError: it is no UTF-8, no JSON, or no object.
    """
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RecordError(f"source {where} is no UTF-8 (byte {line[error.start]:#04x} at {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise RecordError(f"source {where} is no JSON ({error})") from error
    if not isinstance(value, dict):
        raise RecordError(f"source {where} is no JSON object but {type(value).__name__}")
    return value


def text_of(record: Mapping[str, Any], field: str, where: str | Where) -> bytes:
    """The UTF-8 of a record's field.

    Raises:
        RecordError: the field is missing, null or no text, or a lone surrogate is in it.
    """
    if field not in record:
        raise RecordError(f"source {where} has no field {field!r}; it has {', '.join(map(repr, list(record)[:10]))}")
    value = record[field]
    if isinstance(value, bytes):
        return value  # of a parquet file, and checked
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise RecordError(f"source {where}: its field {field!r} is no text but {kind}")
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RecordError(f"source {where}: a lone surrogate at character {error.start} of {field!r}") from error


def rows(
    path: Path, texts: Sequence[str], others: Sequence[str] = (), limit: int = RECORD_LIMIT
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number from 0, values) of each row of a parquet file.

    Args:
        texts: columns that must be there and hold text; of the first one, which may be large, the values are its UTF-8.
        others: columns to read where they are there.
        limit: bytes of a row.

    Raises:
        ValueError: it is damaged or no parquet; a column is missing or holds something else; a row is too large; the
            package pyarrow is missing.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError("parquet needs the package pyarrow; pip install 'tangolm[data]'") from error
    try:
        # Without read-ahead and with a buffer, a column is read page by page and not a row group at once.
        with parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as file:
            schema = file.schema_arrow
            for name in texts:
                if name not in schema.names:
                    found = ", ".join(map(repr, schema.names[:20]))
                    raise ValueError(f"source {str(path)!r} has no column {name!r}; it has {found}")
                kind = schema.field(name).type
                kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
                if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                    raise ValueError(f"source {str(path)!r}: its column {name!r} holds {kind} and no text")
            columns = [*texts, *(name for name in others if name in schema.names)]
            number = 0
            for group in range(file.num_row_groups):
                about = file.metadata.row_group(group)
                sizes = [about.column(index) for index in range(about.num_columns)]
                size = sum(c.total_uncompressed_size for c in sizes if c.path_in_schema in columns)
                mean = size // max(1, about.num_rows)
                if mean > limit:
                    raise ValueError(_too_large(f"{str(path)!r}, a row behind row {number},", limit))
                batch_rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, mean)))
                for batch in file.iter_batches(batch_rows, [group], columns, use_threads=False):
                    small = batch.nbytes <= limit
                    held = [_values(batch.column(name), name in texts, name == texts[0]) for name in columns]
                    del batch
                    while held[0]:  # taken out, so that a large one can go when who reads it is done with it
                        values = {name: column.pop() for name, column in zip(columns, held, strict=True)}
                        if not small and sum(len(v) for v in values.values() if isinstance(v, str | bytes)) > limit:
                            raise ValueError(_too_large(f"{str(path)!r} row {number}", limit))
                        yield number, values
                        del values
                        number += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"source {str(path)!r} is damaged or no parquet file ({text})") from error


def _values(column: Any, text: bool, raw: bool) -> list[Any]:
    """The values of a column of parquet, the last one first."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if raw:
        column.validate(full=True)  # that it is UTF-8
        column = column.view(pyarrow.large_binary() if pyarrow.types.is_large_string(column.type) else pyarrow.binary())
    # Texts come out of numpy several times faster than one by one.
    return column[::-1].to_pylist() if not text else column.to_numpy(zero_copy_only=False)[::-1].tolist()


def too_large(path: Path, limit: int) -> ValueError:
    """The error of a packed file that holds more than `limit` bytes."""
    return ValueError(_too_large(f"{str(path)!r}, unpacked,", limit))


def _too_large(where: str, limit: int) -> str:
    return f"source {where} is larger than {limit:,} bytes; leave it out, or raise record_limit"


class _Zstandard(io.RawIOBase):
    """Unpacks frame after frame; unlike the library's own reader it finds a file that was cut."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ValueError(
                f"source {str(path)!r} needs the package zstandard; pip install 'tangolm[data]'"
            ) from error
        self._error = zstandard.ZstdError
        self._make = lambda: zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()
        self._file, self._frame = file, None
        self._unpacked, self._packed = memoryview(b""), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._unpacked:
            packed = self._packed or self._file.read(_ZSTD_READ)
            self._packed = b""
            if not packed:
                if self._frame is not None:
                    raise EOFError("it ends within a zstandard frame")
                return 0
            if self._frame is None:
                self._frame = self._make()
            try:
                self._unpacked = memoryview(self._frame.decompress(packed))
            except self._error as error:
                raise OSError(str(error)) from error
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._unpacked))
        buffer[:count] = self._unpacked[:count]
        self._unpacked = self._unpacked[count:]
        return count

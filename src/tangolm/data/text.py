"""Files of text as one stream: any folder of them, or a single file.

A file of text is a document; each line of a file of JSON lines and each row of a parquet file is one. Files may be packed
(`.gz`, `.zst`). Bytes are kept as they are, valid UTF-8 or not; a byte order mark is dropped. The stream of a split is its
documents in the order of their paths, an end token behind each, cut into rows of `context` tokens without a gap.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from tangolm.config import suggest
from tangolm.data.held_out import check_fractions, place_of, split_at, token_limits
from tangolm.data.manifest import SPLITS
from tangolm.data.pipeline import Document, Worked, write
from tangolm.data.records import (
    BOM,
    JSON_LINES,
    PACKED,
    PARQUET,
    RECORD_LIMIT,
    RecordError,
    Where,
    lines,
    opened,
    parse,
    rows,
    suffix,
    text_of,
    too_large,
)
from tangolm.data.seen import key
from tangolm.data.source import Progress, at_least, check_context, existing, no_progress, option, whole_number
from tangolm.data.tokenizer import CHOICES, get_tokenizer

NAME = "text"
PIECE = 2**22  # bytes of a file read at a time
_BEFORE_WORD = re.compile(rb"[!-~] (?=[!-~])")


@dataclass(frozen=True)
class TextOptions:
    """Options of `prepare text`.

    A pattern (`*`, `?`, `[...]`) without a slash is compared with every part of a path, one with a slash with the whole
    path below the source.
    """

    context: int = option(256, "tokens a row, at least 2")
    tokenizer: str = option("bytes", CHOICES)
    suffixes: tuple[str, ...] = option(
        (".txt", ".md", ".py", ".jsonl", ".parquet"), "endings of the files to read in a folder, packed ones included"
    )
    include: tuple[str, ...] = option((), "patterns: only files that match one; all where empty")
    exclude: tuple[str, ...] = option(
        ("site-packages", "dist-packages", "__pycache__", ".*"), "patterns: files and folders left out"
    )
    limit_bytes: int | None = option(
        None, "take files, in the order of a hash of their path, until so many bytes are reached"
    )
    split: Literal["auto", "path", "position"] = option(
        "auto", "path: whole files, by a hash of their path; position: the end of each file; auto: path for a folder"
    )
    dev_fraction: float = option(0.05, "part of the files (or of each file) for development")
    test_fraction: float = option(0.05, "part of the files (or of each file) for the test")
    document_masking: bool = option(False, "keep documents in a row from seeing each other")
    field: str = option("text", "the field of JSON lines and the column of parquet that is the text")
    tokens: str | int | None = option(
        None, "end training after so many tokens, such as 1.5B, development and test after their share"
    )
    on_error: Literal["fail", "skip"] = option("fail", "what a line or row that holds no text does; skip counts it")
    record_limit: str | int = option(RECORD_LIMIT, "refuse a line, a row or an unpacked file of more bytes")
    workers: int | None = option(None, "processes that tokenise; one a core where not given")

    def __post_init__(self) -> None:
        check_context(self.context, 2)
        at_least(1, limit_bytes=self.limit_bytes, workers=self.workers)
        for name in ("tokens", "record_limit"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole_number(value, name))
        get_tokenizer(self.tokenizer)
        for ending in self.suffixes:
            if not ending.startswith("."):
                raise ValueError(f"suffixes has {ending!r}, which has no dot; write {'.' + ending!r}")
        if self.split not in ("auto", "path", "position"):
            raise ValueError(f"split {self.split!r} is not known{suggest(self.split, ('auto', 'path', 'position'))}")
        if self.on_error not in ("fail", "skip"):
            raise ValueError(f"on_error {self.on_error!r} is not known{suggest(self.on_error, ('fail', 'skip'))}")
        check_fractions(self.dev_fraction, self.test_fraction)

    def split_of(self, place: float) -> str:
        """The split of what a hash puts at `place`."""
        return split_at(place, self.dev_fraction, self.test_fraction)


@dataclass(frozen=True)
class _File:
    path: Path
    name: str  # relative to the source, with forward slashes
    size: int  # as it lies on the disk
    length: int = 0  # unpacked; 0 for a file of records

    @property
    def place(self) -> float:
        return place_of(self.name.encode("utf-8", "surrogateescape"))

    @property
    def records(self) -> bool:
        return suffix(self.path) in (*JSON_LINES, PARQUET)


class _Piece(NamedTuple):
    """The next bytes of a document of a file of text."""

    split: str
    text: bytes
    ends: bool


class _Record(NamedTuple):
    """A line of JSON or the text of a row; `split` is None where its text decides."""

    where: Where
    line: bytes | None
    row: dict[str, Any] | None
    split: str | None


def prepare(
    source: str | Path | None,
    out: str | Path,
    options: TextOptions | None = None,
    progress: Progress = no_progress,
    *,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Prepare the text of a file or folder in `out`.

    Returns:
        The manifest; its `passed_over` counts empty files, copies of others, links and dropped byte order marks, and with
        records those that were skipped.

    Raises:
        ValueError: an option, a source or a folder that cannot be used; a record without text where they are not skipped;
            a split that would be empty.
    """
    options = options or TextOptions()
    root = existing(source, NAME)
    passed = Counter(empty=0, copies=0, links=0, byte_order_marks=0)
    files = _distinct(_files(root, options, passed), int(options.record_limit), passed)
    by_position = options.split == "position" or (options.split == "auto" and root.is_file())
    parts = [(file, list(_parts(file, options, by_position))) for file in files]
    records = any(file.records for file in files)
    for split in SPLITS:
        if not records and not any(split == name for _, spans in parts for name, _, _ in spans):
            raise ValueError(
                f"split {split!r} would be empty: {len(files)} files of {', '.join(options.suffixes)} in {str(root)!r}; "
                "name more files, or split='position'"
            )
    return write(
        out,
        NAME,
        options,
        items=lambda start: islice(_items(parts, options), start, None),
        work=partial(_work, options=options),
        weigh=partial(_weight, field=options.field),
        tokenizer=options.tokenizer,
        document_masking=options.document_masking,
        workers=options.workers,
        limits=token_limits(options.tokens, options.dev_fraction, options.test_fraction),  # pyright: ignore[reportArgumentType]
        total=0 if records else sum(stop - start for _, spans in parts for _, start, stop in spans),
        passed_over=passed,
        identity=hashlib.sha256(
            repr([(f.name, f.size, f.path.stat().st_mtime_ns) for f in files]).encode()
        ).hexdigest(),
        facts={"generated": False},
        progress=progress,
        overwrite=overwrite,
    )


def _items(parts: list[tuple[_File, list[tuple[str, int, int]]]], options: TextOptions) -> Iterator[_Piece | _Record]:
    limit = int(options.record_limit)
    for file, spans in parts:
        split = options.split_of(file.place) if options.split == "path" else None
        if not file.records:
            for name, start, stop in spans:
                yield from _pieces(file.path, name, start, stop)
        elif suffix(file.path) == PARQUET:
            for number, values in rows(file.path, [options.field], limit=limit):
                yield _Record(Where(file.path, "row", number), None, values, split)
        else:
            for number, line in lines(file.path, limit):
                yield _Record(Where(file.path, "line", number), line, None, split)


def _weight(item: _Piece | _Record, field: str) -> int:
    if isinstance(item, _Piece):
        return len(item.text)
    return len(item.line or b"") if item.row is None else len(item.row[field] or b"")


def _work(item: _Piece | _Record, options: TextOptions) -> Worked:
    if isinstance(item, _Piece):
        return Worked((Document(item.split, NAME, item.text, ends=item.ends),))
    try:
        values = parse(item.line, item.where) if item.line is not None else item.row
        assert values is not None
        text = text_of(values, options.field, item.where)
    except RecordError as error:
        if options.on_error == "skip":
            return Worked((), {"bad_records": 1})
        raise ValueError(f"{error}; mend it, or pass over such records with on_error='skip'") from error
    if not text:
        return Worked((), {"empty": 1})
    # A text is placed by its hash, so that it stays in its split when others come or go.
    split, keys = item.split or options.split_of(place_of(text)), (key(text),)
    return Worked((Document(split, NAME, text, 0, True, keys, keys),))


def _files(root: Path, options: TextOptions, passed: Counter[str]) -> list[_File]:
    """The files that the options name, sorted by name; links are not followed."""
    if root.is_file():
        return [_File(root, root.name, root.stat().st_size)]
    found = []
    for folder, folders, names in os.walk(root):
        inner = Path(folder).relative_to(root).as_posix()
        prefix = "" if inner == "." else f"{inner}/"
        folders[:] = [name for name in folders if not _matches(prefix + name, name, options.exclude)]
        for name in names:
            relative, path = prefix + name, Path(folder) / name
            if suffix(path) not in options.suffixes or _matches(relative, name, options.exclude):
                continue
            if options.include and not any(
                _matches("/".join(relative.split("/")[: depth + 1]), part, options.include)
                for depth, part in enumerate(relative.split("/"))
            ):
                continue
            if path.is_symlink():
                passed["links"] += 1
            elif path.is_file():
                found.append(_File(path, relative, path.stat().st_size))
    if options.limit_bytes is not None:
        found.sort(key=lambda file: (file.place, file.name))
        sizes = 0
        for count, file in enumerate(found):
            if sizes >= options.limit_bytes:
                found = found[:count]
                break
            sizes += file.size
    return sorted(found, key=lambda file: file.name)


def _matches(relative: str, name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(relative if "/" in pattern else name, pattern.rstrip("/")) for pattern in patterns)


def _distinct(files: list[_File], limit: int, passed: Counter[str]) -> list[_File]:
    """The files that hold text, each content once, so that no text of the test is a copy of one of training."""
    seen: set[bytes] = set()
    kept = []
    for file in files:
        if file.records:
            kept.append(file)
            continue
        digest, length = hashlib.sha256(), 0
        with opened(file.path) as stream:
            head = stream.read(len(BOM))
            marked = head == BOM
            piece = b"" if marked else head
            while piece or length == 0:
                digest.update(piece)
                length += len(piece)
                if file.path.suffix in PACKED and length > limit:
                    raise too_large(file.path, limit)
                if not (piece := stream.read(PIECE)):
                    break
        passed["byte_order_marks"] += marked
        if length == 0:
            passed["empty"] += 1
        elif digest.digest() in seen:
            passed["copies"] += 1
        else:
            seen.add(digest.digest())
            kept.append(replace(file, length=length + len(BOM) * marked))
    return kept


def _parts(file: _File, options: TextOptions, by_position: bool) -> Iterator[tuple[str, int, int]]:
    """(split, first byte, last byte + 1) of each document of a file of text."""
    if file.records:
        return
    if not by_position:
        yield options.split_of(file.place), 0, file.length
        return
    # Counted from the end of the file: training comes first, then development, then the test.
    shares = (0.0, options.test_fraction, options.test_fraction + options.dev_fraction, 1.0)
    for split, low, high in (("train", *shares[2:]), ("dev", *shares[1:3]), ("test", *shares[:2])):
        start, stop = (_character(file, round(file.length * (1 - part))) for part in (high, low))
        if start < stop:
            yield split, start, stop


def _character(file: _File, position: int) -> int:
    """The first byte of the UTF-8 character that holds the byte at `position`; the end of the file is its own."""
    if position >= file.length:
        return file.length
    first = max(0, position - 3)
    with opened(file.path) as stream:
        _skip(stream, first)
        found = stream.read(position + 1 - first)
    for back, byte in enumerate(reversed(found[-position:] if position else b"")):
        if byte & 0xC0 != 0x80:
            return position - back
    return position


def _skip(stream: IO[bytes], count: int) -> None:
    if stream.seekable():
        stream.seek(count)
        return
    while count and (piece := stream.read(min(PIECE, count))):
        count -= len(piece)


def _pieces(path: Path, split: str, start: int, stop: int) -> Iterator[_Piece]:
    """The bytes of a document, cut where a tokenizer cuts too: before a space and a word, or else between characters."""
    with opened(path) as stream:
        marked = start == 0 and stream.read(len(BOM)) == BOM
    start += len(BOM) * marked
    with opened(path) as stream:
        _skip(stream, start)
        held, left = b"", stop - start
        while left and (piece := stream.read(min(PIECE, left))):
            left -= len(piece)
            held += piece
            if left:
                cut = _cut(held)
                yield _Piece(split, held[:cut], False)
                held = held[cut:]
        yield _Piece(split, held, True)


def _cut(text: bytes) -> int:
    found = deque(_BEFORE_WORD.finditer(text, max(0, len(text) - 2**16)), maxlen=1)
    if found:
        return found[0].start() + 1
    for back in range(1, min(4, len(text))):
        if text[-back] & 0xC0 != 0x80:  # a character begins here, and goes on in what follows unless it is ASCII
            return len(text) - back if text[-back] >= 0xC0 else len(text) - back + 1
    return len(text)

"""Files of text as one stream of bytes: any folder of them, or a single file.

Bytes are kept as they are, valid UTF-8 or not; a byte order mark is dropped. The stream of a split is its documents in the
order of their paths, an end token behind each, cut into rows of `context` tokens without a gap.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from tangolm.config import suggest
from tangolm.data.manifest import SPLITS
from tangolm.data.rows import Stream
from tangolm.data.shards import ShardWriter, claim, write_manifest
from tangolm.data.source import LONGEST_CONTEXT, Progress, at_least, existing, new_manifest, no_progress, option
from tangolm.data.tokenizer import TOKENIZERS, get_tokenizer

NAME = "text"
BOM = b"\xef\xbb\xbf"
PIECE = 2**22  # bytes of a file read at a time


@dataclass(frozen=True)
class TextOptions:
    """Options of `prepare text`.

    A pattern (`*`, `?`, `[...]`) without a slash is compared with every part of a path, one with a slash with the whole
    path below the source.
    """

    context: int = option(256, "tokens a row, at least 2")
    tokenizer: str = option("bytes", f"one of: {', '.join(TOKENIZERS)}")
    suffixes: tuple[str, ...] = option((".txt", ".md", ".py"), "endings of the files to read in a folder")
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

    def __post_init__(self) -> None:
        if self.context > LONGEST_CONTEXT:
            raise ValueError(f"context must be at most {LONGEST_CONTEXT:,}, got {self.context}")
        at_least(2, context=self.context)
        at_least(1, limit_bytes=self.limit_bytes)
        get_tokenizer(self.tokenizer)
        for suffix in self.suffixes:
            if not suffix.startswith("."):
                raise ValueError(f"suffixes has {suffix!r}, which has no dot; write {'.' + suffix!r}")
        if self.split not in ("auto", "path", "position"):
            raise ValueError(f"split {self.split!r} is not known{suggest(self.split, ('auto', 'path', 'position'))}")
        for name in ("dev_fraction", "test_fraction"):
            if not 0 < getattr(self, name) < 0.5:
                raise ValueError(f"{name} must be above 0 and below 0.5, got {getattr(self, name)}")


@dataclass(frozen=True)
class _File:
    path: Path
    name: str  # relative to the source, with forward slashes
    size: int

    @property
    def place(self) -> float:
        """Where a hash of the name puts the file between 0 and 1."""
        return int.from_bytes(hashlib.sha256(self.name.encode("utf-8", "surrogateescape")).digest()[:8], "big") / 2**64


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
        The manifest; its `passed_over` counts empty files, copies of others, links and dropped byte order marks.

    Raises:
        ValueError: an option, a source or a folder that cannot be used; a split that would be empty.
    """
    options = options or TextOptions()
    root = existing(source, NAME)
    passed = Counter(empty=0, copies=0, links=0, byte_order_marks=0)
    files = _distinct(_files(root, options, passed), passed)
    by_position = options.split == "position" or (options.split == "auto" and root.is_file())
    parts = {split: list(_parts(files, split, options, by_position)) for split in SPLITS}
    for split, documents in parts.items():
        if not documents:
            raise ValueError(
                f"split {split!r} would be empty: {len(files)} files of {', '.join(options.suffixes)} in {str(root)!r}; "
                "name more files, or split='position'"
            )
    out = claim(Path(out), NAME, overwrite)
    tokenizer = get_tokenizer(options.tokenizer)
    manifest = new_manifest(NAME, options, tokenizer, options.document_masking, generated=False)
    total = sum(stop - start for documents in parts.values() for _, start, stop in documents)
    done, splits = 0, {}
    for split, documents in parts.items():
        writer = ShardWriter(out, split, options.context, tokenizer.vocab_size)
        rows = Stream(writer, options.context, tokenizer.end_token, options.document_masking)
        for file, start, stop in documents:
            for piece in _pieces(file.path, start, stop):
                rows.add(tokenizer.encode_bytes(piece), len(piece))
                done += len(piece)
                progress(done, total, f"reading {split}")
            rows.end()
        splits[split] = rows.close()
        splits[split]["sources"] = [{"name": NAME, "documents": rows.documents, "rows": [0, rows.rows]}]
    manifest |= {"passed_over": dict(passed), "splits": splits}
    write_manifest(out, manifest)
    return manifest


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
            if path.suffix not in options.suffixes or _matches(relative, name, options.exclude):
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


def _distinct(files: list[_File], passed: Counter[str]) -> list[_File]:
    """The files that hold text, each content once, so that no text of the test is a copy of one of training."""
    seen: set[bytes] = set()
    kept = []
    for file in files:
        try:
            with file.path.open("rb") as stream:
                marked = stream.read(len(BOM)) == BOM
                stream.seek(len(BOM) if marked else 0)
                digest = hashlib.file_digest(stream, "sha256").digest()
                length = stream.tell() - (len(BOM) if marked else 0)
        except OSError as error:
            raise ValueError(f"source {str(file.path)!r} cannot be read ({error.strerror}); exclude it") from error
        passed["byte_order_marks"] += marked
        if length == 0:
            passed["empty"] += 1
        elif digest in seen:
            passed["copies"] += 1
        else:
            seen.add(digest)
            kept.append(file)
    return kept


def _parts(files: list[_File], split: str, options: TextOptions, by_position: bool) -> Iterator[tuple[_File, int, int]]:
    """(file, first byte, last byte + 1) of each document of a split."""
    bounds = {
        "test": (0.0, options.test_fraction),
        "dev": (options.test_fraction, options.test_fraction + options.dev_fraction),
        "train": (options.test_fraction + options.dev_fraction, 1.0),
    }
    low, high = bounds[split]
    for file in files:
        if not by_position:
            if low <= file.place < high:
                yield file, 0, file.size
        else:  # counted from the end of the file: training comes first, then development, then the test
            start, stop = (_character(file, round(file.size * (1 - part))) for part in (high, low))
            if start < stop:
                yield file, start, stop


def _character(file: _File, position: int) -> int:
    """The first byte of the UTF-8 character that holds the byte at `position`; the end of the file is its own."""
    if position >= file.size:
        return file.size
    with file.path.open("rb") as stream:
        for back in range(min(4, position)):
            stream.seek(position - back)
            byte = stream.read(1)
            if byte and byte[0] & 0xC0 != 0x80:
                return position - back
    return position


def _pieces(path: Path, start: int, stop: int) -> Iterator[bytes]:
    with path.open("rb") as stream:
        stream.seek(start)
        if start == 0 and stream.read(len(BOM)) == BOM:
            start = len(BOM)
        stream.seek(start)
        while start < stop and (piece := stream.read(min(PIECE, stop - start))):
            yield piece
            start += len(piece)

"""Token shards: rows of `context` tokens as .npy memory maps, written in one step each and checked by sha256.

`<split>-00000.tokens.npy` is uint16 (uint32 for vocabularies above 65,536) [rows, context]; `<split>-00000.supervised.npy`
bool [rows, context] stands beside it where some tokens are no target of the loss.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tangolm.config import suggest
from tangolm.data.manifest import SplitEntry, check_manifest, claim, read_manifest, replacing, write_manifest

__all__ = ["ShardWriter", "Split", "claim", "open_split", "read_manifest", "write_manifest"]

SHARD_TOKENS = 2**24  # 32 MiB of uint16: what a writer holds in memory


class ShardWriter:
    """Collects the rows of a split and writes a shard whenever `SHARD_TOKENS` are together."""

    def __init__(
        self, folder: Path, split: str, context: int, vocab_size: int, shard_tokens: int | None = None
    ) -> None:
        self._folder, self._split = folder, split
        self._dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
        self._capacity = max(1, (shard_tokens or SHARD_TOKENS) // context)
        self._context = context
        self._tokens, self._supervised = self._buffers()
        self._held = 0
        self.rows = 0
        self.shards: list[dict[str, Any]] = []

    def add(self, tokens: np.ndarray, supervised: np.ndarray) -> None:
        """Append one row: tokens [context], supervised bool [context]."""
        self.add_rows(tokens[None], supervised[None])

    def add_rows(self, tokens: np.ndarray, supervised: np.ndarray | bool) -> None:
        """Append rows: tokens [rows, context], supervised bool [rows, context] or the same for all of them."""
        start = 0
        while start < len(tokens):
            stop = start + min(len(tokens) - start, self._capacity - self._held)
            held = slice(self._held, self._held + stop - start)
            self._tokens[held] = tokens[start:stop]
            self._supervised[held] = supervised if isinstance(supervised, bool) else supervised[start:stop]
            self._held += stop - start
            self.rows += stop - start
            start = stop
            if self._held == self._capacity:
                self._flush()

    def close(self) -> list[dict[str, Any]]:
        """Write what is left; the shards' entries for the manifest."""
        self._flush()
        return self.shards

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """What a journal keeps of it: entries of the shards that are written, and the rows that are not."""
        held = {"rows.tokens": self._tokens[: self._held], "rows.supervised": self._supervised[: self._held]}
        return {"rows": self.rows, "shards": self.shards}, held

    def restore(self, numbers: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Go on from a state that a journal kept.

        Raises:
            ValueError: a shard that was written by then is missing or damaged.
        """
        for shard in numbers["shards"]:
            for suffix, expected in shard["sha256"].items():
                _check(self._folder / f"{shard['name']}.{suffix}", expected)
        self.rows, self.shards = numbers["rows"], list(numbers["shards"])
        self._held = len(arrays["rows.tokens"])
        self._tokens[: self._held] = arrays["rows.tokens"]
        self._supervised[: self._held] = arrays["rows.supervised"]

    def _buffers(self) -> tuple[np.ndarray, np.ndarray]:
        shape = (self._capacity, self._context)
        return np.empty(shape, self._dtype), np.empty(shape, bool)

    def _flush(self) -> None:
        if not self._held:
            return
        name = f"{self._split}-{len(self.shards):05d}"
        tokens, supervised = self._tokens[: self._held], self._supervised[: self._held]
        sha256 = {"tokens.npy": _save(self._folder / f"{name}.tokens.npy", tokens)}
        if not supervised.all():
            sha256["supervised.npy"] = _save(self._folder / f"{name}.supervised.npy", supervised)
        self.shards.append({"name": name, "rows": self._held, "sha256": sha256})
        self._held = 0


class Split:
    """A split of a prepared folder, its shards memory-mapped."""

    def __init__(self, folder: Path, name: str, manifest: dict[str, Any], entry: SplitEntry) -> None:
        self.folder, self.name, self.manifest, self.entry = folder, name, manifest, entry
        self.rows: int = entry.rows
        self.context: int = manifest["context"]
        self.end_token: int = manifest["end_token"]
        self.document_masking: bool = manifest["document_masking"]
        self._first = np.cumsum([0, *(shard.rows for shard in entry.shards)])

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Row `index`: tokens int64 [context], supervised bool [context].

        Raises:
            ValueError: no such row.
        """
        if not 0 <= index < self.rows:
            raise ValueError(f"row {index} is outside the {self.rows} rows of the split {self.name!r}")
        shard = int(np.searchsorted(self._first, index, side="right")) - 1
        tokens, supervised = self._maps[shard]
        within = index - int(self._first[shard])
        row = tokens[within].astype(np.int64)
        return row, np.ones(self.context, bool) if supervised is None else np.array(supervised[within])

    def blocks(self, rows: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The rows in order, at most `rows` together: tokens as they are stored [n, context], supervised bool [n, context]."""
        for tokens, supervised in self._maps:
            for first in range(0, len(tokens), rows):
                block = tokens[first : first + rows]
                marks = np.ones(block.shape, bool) if supervised is None else supervised[first : first + rows]
                yield block, marks

    def masked(self, index: int) -> bool:
        """Whether the documents of row `index` are kept from seeing each other."""
        return self.document_masking

    def verify(self, progress: Callable[[int, int, str], None] | None = None) -> None:
        """Hash every shard.

        Raises:
            ValueError: a shard's bytes are not those that were prepared; its file is named.
        """
        for number, shard in enumerate(self.entry.shards):
            for suffix, expected in shard.sha256.items():
                _check(self.folder / f"{shard.name}.{suffix}", expected)
            if progress is not None:
                progress(number + 1, len(self.entry.shards), f"checking {self.name}")

    @cached_property
    def _maps(self) -> list[tuple[np.ndarray, np.ndarray | None]]:
        dtype = np.uint16 if self.manifest["vocab_size"] <= 2**16 else np.uint32
        maps = []
        for shard in self.entry.shards:
            shape = (shard.rows, self.context)
            tokens = _map(self.folder / f"{shard.name}.tokens.npy", shape, dtype)
            path = self.folder / f"{shard.name}.supervised.npy"
            maps.append((tokens, _map(path, shape, bool) if "supervised.npy" in shard.sha256 else None))
        return maps


def open_split(folder: str | Path, split: str) -> Split:
    """Open a split for reading; every shard must be there with the shape that the manifest states.

    Raises:
        ValueError: as `read_manifest`; an unknown or absent split; a shard that is missing or damaged.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    entries = check_manifest(manifest, str(folder)).splits
    if split not in entries:
        raise ValueError(f"split {split!r} is not in the data {str(folder)!r}{suggest(split, entries)}")
    result = Split(folder, split, manifest, entries[split])
    assert len(result._maps) == len(entries[split].shards)  # opened here, so that a missing shard is found at once
    return result


def _map(path: Path, shape: tuple[int, int], dtype: Any) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(_damaged(path, "it is missing")) from None
    except Exception as error:  # a damaged header comes out as whatever Python's own parser says of it
        raise ValueError(_damaged(path, f"it is no readable .npy ({type(error).__name__})")) from error
    if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != np.dtype(dtype):
        raise ValueError(_damaged(path, f"it is not {np.dtype(dtype)} {list(shape)} as the manifest states"))
    return array


def _damaged(path: Path, why: str) -> str:
    return f"shard {str(path)!r} is damaged: {why}; prepare the folder again"


def _save(path: Path, array: np.ndarray) -> str:
    with replacing(path) as file:
        hashing = _Hashing(file)
        np.lib.format.write_array(hashing, np.ascontiguousarray(array), allow_pickle=False)  # pyright: ignore[reportArgumentType]
    return hashing.digest.hexdigest()


class _Hashing:
    """Hashes what was meant to be written: a fault of the disk between memory and file is then found by `verify`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._file.write(data)


def _check(path: Path, expected: str) -> None:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(_damaged(path, f"it cannot be read ({error.strerror})")) from error
    if digest != expected:
        raise ValueError(_damaged(path, "its bytes are not those that were prepared (sha256 differs)"))

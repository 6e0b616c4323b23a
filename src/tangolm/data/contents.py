"""What a prepared folder or a mixture holds, as JSON data: its manifest, the lengths of its documents, a row of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tangolm.data.mixture import MixedSplit, open_data
from tangolm.data.shards import Split
from tangolm.data.source import Progress, no_progress
from tangolm.data.tokenizer import Tokenizer, get_tokenizer

PIECE = 2**22  # tokens looked at together
BINS = 63  # lengths of 1, 2 to 3, 4 to 7, ...


def show(folder: str | Path, split: str = "train", row: int = 0, progress: Progress = no_progress) -> dict[str, Any]:
    """Look into prepared data; every shard of the split is hashed and read.

    Args:
        folder: a prepared folder or a mixture.
        split: of which the lengths are counted and the row is shown.
        row: of the split; negative ones count from its end.
        progress: called with (done, total, text).

    Returns:
        JSON data: manifest; split; lengths, a histogram (see `lengths`) by part, or one by the data set's name where it is
        no mixture; sample: row, part (None where it is no mixture), pieces: [{text, tokens, kind}] in the order of the row,
        kind "supervised" (a target of the loss), "given" (read, but no target), "end" (the end token of a document) or
        "padding".

    Raises:
        ValueError: data that cannot be read (a damaged shard is named), an unknown split, a row outside it.
    """
    opened = open_data(folder, split)
    opened.verify(progress)
    parts = opened.parts if isinstance(opened, MixedSplit) else {opened.manifest["dataset"]: opened}
    place = row + opened.rows if row < 0 else row
    if not 0 <= place < opened.rows:
        raise ValueError(f"row {row} is outside the {opened.rows} rows of the split {split!r}")
    part = None
    if isinstance(opened, MixedSplit):
        part = list(parts)[int(np.searchsorted(opened.first, place, side="right")) - 1]
    return {
        "manifest": opened.manifest,
        "split": split,
        "lengths": {name: lengths(own, progress) for name, own in parts.items()},
        "sample": {"row": place, "part": part, "pieces": _pieces(opened, place)},
    }


def lengths(split: Split, progress: Progress = no_progress) -> dict[str, Any]:
    """The lengths of a split's documents in tokens, their end tokens included.

    Returns:
        documents (that end in the split); tokens of them all; mean, shortest, longest (None without documents);
        bytes_per_token, as the manifest has it; histogram: [{from, to, documents}], each bin twice as wide as the last.
    """
    bins, documents, total, shortest, longest = np.zeros(BINS, np.int64), 0, 0, None, 0
    for own in _lengths(split, progress):
        if len(own):
            bins += np.bincount(np.frexp(own)[1] - 1, minlength=BINS)
            documents, total = documents + len(own), total + int(own.sum())
            shortest = min(int(own.min()), shortest or int(own.min()))
            longest = max(int(own.max()), longest)
    used = np.flatnonzero(bins)
    span = range(int(used[0]), int(used[-1]) + 1) if len(used) else range(0)
    return {
        "documents": documents,
        "tokens": total,
        "mean": total / documents if documents else None,
        "shortest": shortest,
        "longest": longest or None,
        "bytes_per_token": split.entry.bytes_per_token,
        "histogram": [{"from": 2**bin, "to": 2 ** (bin + 1) - 1, "documents": int(bins[bin])} for bin in span],
    }


def _lengths(split: Split, progress: Progress) -> Iterator[np.ndarray]:
    """The lengths of the documents that end in one piece of the split after another."""
    done = begun = 0  # rows; tokens behind the last end token so far
    for tokens, supervised in split.blocks(max(1, PIECE // split.context)):
        ends = np.flatnonzero(tokens == split.end_token)
        # A token of padding is an end token too, but never a target: it closes no document.
        yield np.diff(ends, prepend=-1 - begun)[supervised.reshape(-1)[ends]]
        begun = tokens.size - 1 - int(ends[-1]) if len(ends) else begun + tokens.size
        done += len(tokens)
        progress(done, split.rows, f"reading {split.name}")


def _pieces(split: Split | MixedSplit, row: int) -> list[dict[str, Any]]:
    """A row in pieces of one kind each, decoded."""
    tokenizer: Tokenizer = get_tokenizer(split.manifest["tokenizer"])
    tokens, supervised = split.row(row)
    ends = tokens == split.end_token
    kinds = np.select([ends & supervised, ends, supervised], ["end", "padding", "supervised"], "given")
    borders = np.flatnonzero((kinds[1:] != kinds[:-1]) | (kinds[1:] == "end")) + 1
    pieces = []
    for start, stop in zip([0, *borders], [*borders, len(tokens)], strict=True):
        kind = str(kinds[start])
        text = tokenizer.decode(tokens[start:stop].tolist()) if kind in ("supervised", "given") else ""
        pieces.append({"kind": kind, "tokens": int(stop - start), "text": text})
    return pieces

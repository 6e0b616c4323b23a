"""From raw items to shards: items are worked and tokenised in other processes, and their documents written in order.

An item is what a data set reads; `work` makes finished documents of it. Whatever the number of processes, and whether or
not a preparation was killed on the way, its shards and its manifest are the same byte for byte: results are taken in the
order of the items, and a journal keeps the exact state between two chunks of them, half-filled rows and shards included.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tangolm.data.encoded import Chunk, Document, EncodedChunk, Worked, chunks, encode, size_of
from tangolm.data.manifest import JOURNAL, SPLITS, claim, replacing, resumes, write_manifest
from tangolm.data.part import Part
from tangolm.data.rows import Stream, WholeDocuments
from tangolm.data.seen import Seen
from tangolm.data.shards import ShardWriter
from tangolm.data.source import Progress, cores, new_manifest, no_progress
from tangolm.data.tokenizer import get_tokenizer
from tangolm.data.workers import runner

__all__ = ["Document", "Pass", "Worked", "write"]

ALONE = 2**22  # bytes of items worked in this process before others are started, which takes them seconds
JOURNAL_SECONDS = 30.0
REPORT_SECONDS = 0.1


@dataclass(frozen=True)
class Pass:
    """Items from number `start` on, light and picklable, in an order that is always the same; they end early when the
    limits of all of `splits` are reached, the only ones that their documents may belong to."""

    items: Callable[[int], Iterable[Any]]
    splits: tuple[str, ...] = SPLITS


def write(
    out: str | Path,
    dataset: str,
    options: Any,
    *,
    items: Callable[[int], Iterable[Any]] | Sequence[Pass],
    work: Callable[[Any], Worked],
    weigh: Callable[[Any], int],
    tokenizer: str,
    document_masking: bool,
    workers: int | None = None,
    whole_documents: bool = False,
    by_source: bool = False,
    limits: Mapping[str, int | None] | None = None,
    total: int = 0,
    copies: str = "copies",
    passed_over: Mapping[str, int] | None = None,
    identity: Any = None,
    packages: Iterable[str] = (),
    facts: Mapping[str, Any] | None = None,
    progress: Progress = no_progress,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Prepare the documents of `items` in `out`, or go on with what an interrupted preparation of them left there.

    Args:
        options: the data set's options; `context` is taken from them.
        items: read on from number `start` at each call; or several passes, one after the other.
        work: a function of a module, or a partial of one: it runs in new interpreters.
        weigh: the bytes that an item is or stands for; how many travel and are held together depends on it.
        tokenizer: its name.
        document_masking: whether documents are kept from seeing each other.
        workers: processes; None takes one a core.
        whole_documents: pack whole documents into rows instead of cutting a stream; each then needs a prompt, and one that
            is longer than a row is passed over and counted as "too_long".
        by_source: documents of a source come together in each split; a row then holds one source only, in dev and test.
        limits: tokens of a split at which it ends exactly, end tokens counted and padding not.
        total: bytes of all documents together, for the progress; 0 where it is not known.
        copies: under which name to count documents dropped by `Document.unless`.
        passed_over: counts to begin with.
        identity: JSON data that tells this source from another, such as names and sizes of its files; not in the manifest.
        packages: whose versions the manifest states.
        facts: further fields of the manifest.
        progress: called with documents' bytes done of `total`, or tokens done of the limits where all splits have one.

    Returns:
        The manifest.

    Raises:
        ValueError: a folder that cannot be used; an interrupted preparation of something else in it; an empty split; what
            `items` and `work` raise.
    """
    out, limits = Path(out), dict(limits or {})
    passes = [Pass(items)] if callable(items) else list(items)
    coder = get_tokenizer(tokenizer)
    manifest = new_manifest(dataset, options, coder, document_masking, packages, **(facts or {}))
    plan = {
        **manifest,
        **manifest["arguments"],
        "arguments": None,
        "source": identity,
        "found": dict(passed_over or {}),
    }
    plan = json.loads(json.dumps(plan))  # as it is read back: lists, no tuples
    goes_on = resumes(out, plan, overwrite)
    if not goes_on:
        claim(out, dataset, overwrite, plan)
    parts = {}
    for split in SPLITS:
        writer, limit = ShardWriter(out, split, options.context, coder.vocab_size), limits.get(split)
        if whole_documents:
            rows = WholeDocuments(writer, options.context, coder.end_token, limit)
        else:
            rows = Stream(writer, options.context, coder.end_token, document_masking, limit)
        parts[split] = Part(rows, options.context, by_source and split != "train")
    state = _State(out / JOURNAL, parts, Counter(passed_over or {}))
    if goes_on:
        state.load()
    seen = Seen(out, state.steps)
    encoded = partial(encode, work=work, tokenizer=tokenizer)
    bounds = [limits.get(split) for split in {split for one in passes for split in one.splits}]
    report = _Report(progress, state, total, sum(bound or 0 for bound in bounds) if all(bounds) else 0)
    try:
        with runner(encoded, cores() if workers is None else workers, f"preparing {dataset}", size_of) as run:
            for current in passes[state.passes :]:
                read = chunks(current.items(state.items), weigh)
                with closing(_results(read, encoded, run)) as results:
                    while not all(parts[split].rows.full for split in current.splits):
                        if (chunk := next(results, None)) is None:
                            break
                        _take(chunk, state, seen, current.splits, copies)
                        del chunk
                        if state.due():
                            seen.save()
                            state.save()
                        report(current.splits)
                state.passes, state.items = state.passes + 1, 0
        report.end()
        manifest["passed_over"] = dict(state.counts)
        manifest["splits"] = {split: part.close() for split, part in parts.items()}
    finally:
        seen.close()
    for split, entry in manifest["splits"].items():
        if not entry["rows"]:
            raise ValueError(
                f"split {split!r} would be empty: of {state.steps:,} items of {dataset} none came to it "
                f"({', '.join(f'{name} {count:,}' for name, count in state.counts.items())}); give more data"
            )
    write_manifest(out, manifest)
    seen.remove()
    return manifest


def _results(
    read: Iterator[Chunk],
    encoded: Callable[[Chunk], EncodedChunk],
    run: Callable[[Iterable[Chunk]], Generator[tuple[Chunk, EncodedChunk]]],
) -> Generator[EncodedChunk]:
    """What came of each chunk, in order; the first ones are worked here, so that a small source starts no process."""
    held = 0
    while held < ALONE:
        if (chunk := next(read, None)) is None:
            return
        held += size_of(chunk)
        yield encoded(chunk)
    with closing(run(read)) as results:
        for _, result in results:
            yield result


class _State:
    """How far a preparation has come, in memory and in its journal."""

    def __init__(self, journal: Path, parts: Mapping[str, Part], counts: Counter[str]) -> None:
        self._journal, self.parts, self.counts = journal, parts, counts
        self.passes = self.items = 0  # passes that are over, items taken of the one that is not
        self.steps = self.bytes = 0  # items of all passes, bytes of all documents
        self._saved = time.monotonic()

    def due(self) -> bool:
        return time.monotonic() - self._saved >= JOURNAL_SECONDS

    def save(self) -> None:
        """Keep the state, in one step."""
        numbers: dict[str, Any] = {
            name: getattr(self, name) for name in ("passes", "items", "steps", "bytes", "counts")
        }
        arrays = {}
        numbers["parts"] = {}
        for split, part in self.parts.items():
            numbers["parts"][split], held = part.state()
            arrays |= {f"{split}.{name}": array for name, array in held.items()}
        with replacing(self._journal) as file:
            np.savez(file, numbers=np.frombuffer(json.dumps(numbers).encode(), np.uint8), **arrays)
        self._saved = time.monotonic()

    def load(self) -> None:
        """Go on from the state that was kept; what was written after it is deleted.

        Raises:
            ValueError: a journal, or a shard that was written before it, is damaged.
        """
        try:
            with np.load(self._journal, allow_pickle=False) as kept:
                numbers = json.loads(kept["numbers"].tobytes())
                arrays = {name: kept[name] for name in kept.files}
        except Exception as error:  # zipfile, zlib, numpy and json each say it their own way
            raise ValueError(f"journal {str(self._journal)!r} is damaged ({error}); overwrite the folder") from error
        counts = Counter(numbers["counts"])
        self.passes, self.items, self.steps, self.bytes, self.counts = (
            *(numbers[name] for name in ("passes", "items", "steps", "bytes")),
            counts,
        )
        for split, part in self.parts.items():
            held = {name.removeprefix(f"{split}."): array for name, array in arrays.items() if name.startswith(split)}
            part.restore(numbers["parts"][split], held)


def _take(chunk: EncodedChunk, state: _State, seen: Seen, splits: tuple[str, ...], copies: str) -> None:
    """Write the documents of a chunk, but for copies and for those of splits that are full; items behind the end of all
    splits leave nothing, not even in the counts."""
    known = seen.known(key for document in chunk.documents for key in document.unless)
    noted: dict[int, int] = {}
    documents, first, ended = iter(chunk.documents), 0, False
    for place, count in enumerate(chunk.items):
        if ended:
            break
        if place in chunk.counts:
            state.counts.update(chunk.counts[place])
        for encoded in islice(documents, count):
            assert encoded.split in splits
            assert encoded.ends or not encoded.unless  # a part of a document cannot be dropped by itself
            part = state.parts[encoded.split]
            state.bytes += encoded.size
            start, first = first, first + encoded.tokens
            if part.rows.full:
                continue
            if encoded.unless and not known.isdisjoint(encoded.unless):
                state.counts[copies] += 1
            elif not part.add(encoded, start, chunk.tokens):
                state.counts["too_long"] += 1
            elif encoded.notes:
                known.update(encoded.notes)
                for key in encoded.notes:
                    noted.setdefault(key, state.steps)
            if part.rows.full:
                ended = all(state.parts[split].rows.full for split in splits)
        state.items += 1
        state.steps += 1
    for part in state.parts.values():
        part.flush(chunk.tokens)
    seen.note(noted)


class _Report:
    """Tells of the progress now and then: tokens of `tokens`, or where that is 0 bytes of `total`."""

    def __init__(self, progress: Progress, state: _State, total: int, tokens: int) -> None:
        self._progress, self._state, self._total, self._tokens = progress, state, tokens or total, tokens
        self._last = 0.0

    def __call__(self, splits: tuple[str, ...]) -> None:
        if time.monotonic() - self._last < REPORT_SECONDS:
            return
        self._last = time.monotonic()
        state = self._state
        done = sum(part.rows.stream_tokens for part in state.parts.values()) if self._tokens else state.bytes
        what = f"preparing {' and '.join(splits)} ({'tokens' if self._tokens else 'bytes'})"
        self._progress(min(done, self._total - 1) if self._total else done, self._total, what)

    def end(self) -> None:
        total = self._total or self._state.bytes
        self._progress(total, total, "preparing")

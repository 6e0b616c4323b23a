"""From raw items to shards: items are worked and tokenised in other processes, and their documents written in order.

An item is what a data set reads; `work` makes finished documents of it. Whatever the number of processes, and whether or
not a preparation was killed on the way, its shards and its manifest are the same byte for byte: results are taken in the
order of the items, and a journal keeps the exact state between two of them, half-filled rows and shards included.
"""

from __future__ import annotations

import json
import pickle
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tangolm.data.manifest import JOURNAL, SPLITS, claim, replacing, resumes, write_manifest
from tangolm.data.rows import Stream, WholeDocuments
from tangolm.data.seen import Seen
from tangolm.data.shards import ShardWriter
from tangolm.data.source import Progress, cores, new_manifest, no_progress
from tangolm.data.tokenizer import Tokenizer, get_tokenizer
from tangolm.data.workers import runner

CHUNK_BYTES, CHUNK_ITEMS = 2**18, 512  # of pickled items that travel to a worker together
ALONE = 2**22  # bytes of items worked in this process before others are started, which takes them seconds
JOURNAL_SECONDS = 30.0
REPORT_SECONDS = 0.1


@dataclass(frozen=True)
class Document:
    """A finished document of a split.

    Args:
        split: "train", "dev" or "test".
        source: the part of the split that it belongs to.
        text: its bytes, or the next ones of the document before it where that has `ends` false.
        prompt: so many of its first bytes are no targets of the loss; they are tokenised by themselves.
        ends: whether the document ends here; the parts of one that is longer than memory come one after the other.
        notes: keys (`seen.key`) to note.
        unless: it is dropped and counted where one of these keys was noted by an earlier document that was written.
    """

    split: str
    source: str
    text: bytes
    prompt: int = 0
    ends: bool = True
    notes: tuple[int, ...] = ()
    unless: tuple[int, ...] = ()


@dataclass(frozen=True)
class Worked:
    """What came of an item: documents in order, and counts of what was passed over."""

    documents: tuple[Document, ...]
    counts: Mapping[str, int] = field(default_factory=dict)


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
        parts[split] = _Part(rows, options.context, by_source and split != "train")
    state = _State(out / JOURNAL, parts, Counter(passed_over or {}))
    if goes_on:
        state.load()
    seen = Seen(out, state.steps)
    encode = partial(_encode, work=work, tokenizer=tokenizer)
    bounds = [limits.get(split) for split in {split for one in passes for split in one.splits}]
    report = _Report(progress, state, total, sum(bound or 0 for bound in bounds) if all(bounds) else 0)
    try:
        with runner(encode, cores() if workers is None else workers, f"preparing {dataset}", _size) as run:
            for current in passes[state.passes :]:
                with closing(_results(current.items(state.items), encode, run)) as results:
                    while not all(parts[split].rows.full for split in current.splits):
                        if (encoded := next(results, None)) is None:
                            break
                        _take(encoded, state, seen, current.splits, copies)
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


@dataclass(slots=True)  # not frozen: there are as many of them as documents
class _Encoded:
    """A document in tokens, of which the first `prompt` ones are not supervised; sizes are bytes of text."""

    split: str
    source: str
    tokens: np.ndarray
    prompt: int
    prompt_size: int
    size: int
    ends: bool
    notes: tuple[int, ...]
    unless: tuple[int, ...]


_Item = tuple[Mapping[str, int], list[_Encoded]]  # what came of an item
_Chunk = tuple[bytes, ...]  # pickled items


def _encode(chunk: _Chunk, work: Callable[[Any], Worked], tokenizer: str) -> list[_Item]:
    coder = get_tokenizer(tokenizer)
    return [
        (worked.counts, [_tokens(document, coder) for document in worked.documents])
        for worked in (work(pickle.loads(item)) for item in chunk)
    ]


def _tokens(document: Document, coder: Tokenizer) -> _Encoded:
    text, dtype = document.text, np.uint16 if coder.vocab_size <= 2**16 else np.uint32
    tokens, prompt = coder.encode_bytes(text[document.prompt :]), 0
    if document.prompt:
        before = coder.encode_bytes(text[: document.prompt])
        tokens, prompt = np.concatenate([before, tokens]), len(before)
    return _Encoded(
        document.split,
        document.source,
        tokens.astype(dtype, copy=False),
        prompt,
        document.prompt,
        len(text),
        document.ends,
        document.notes,
        document.unless,
    )


def _chunks(items: Iterable[Any]) -> Iterator[_Chunk]:
    chunk, held = [], 0
    for item in items:
        data = pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL)
        chunk.append(data)
        held += len(data)
        if held >= CHUNK_BYTES or len(chunk) == CHUNK_ITEMS:
            yield tuple(chunk)
            chunk, held = [], 0
    if chunk:
        yield tuple(chunk)


def _size(chunk: _Chunk) -> int:
    return sum(map(len, chunk))


def _results(
    items: Iterable[Any],
    encode: Callable[[_Chunk], list[_Item]],
    run: Callable[[Iterable[_Chunk]], Generator[tuple[_Chunk, list[_Item]]]],
) -> Generator[_Item]:
    """What came of each item, in order; the first ones are worked here, so that a small source starts no process."""
    chunks, held = _chunks(items), 0
    while held < ALONE:
        if (chunk := next(chunks, None)) is None:
            return
        yield from encode(chunk)
        held += _size(chunk)
    with closing(run(chunks)) as results:
        for _, encoded in results:
            yield from encoded


class _Part:
    """A split that is being written, and which documents of which source it has."""

    def __init__(self, rows: Stream | WholeDocuments, context: int, by_source: bool) -> None:
        self.rows, self._context, self._by_source = rows, context, by_source
        self._documents: dict[str, int] = {}
        self._ranges: dict[str, list[int] | None] = {}
        self._last: str | None = None

    def add(self, encoded: _Encoded) -> bool:
        """Write a document; False where it is longer than a row that must hold it whole."""
        rows, documents = self.rows, self.rows.documents
        prompt, answer = encoded.tokens[: encoded.prompt], encoded.tokens[encoded.prompt :]
        if isinstance(rows, WholeDocuments) and len(encoded.tokens) + 1 > self._context:
            return False
        if self._by_source and encoded.source != self._last:
            rows.break_row()
            # A source that comes a second time has rows that do not stand together.
            self._ranges[encoded.source] = None if encoded.source in self._ranges else [rows.rows, rows.rows]
            if self._last is not None and (last := self._ranges[self._last]) is not None:
                last[1] = rows.rows
        self._last = encoded.source
        if isinstance(rows, WholeDocuments):
            rows.add(prompt, answer, encoded.prompt_size, encoded.size - encoded.prompt_size)
        else:
            if encoded.prompt_size:
                rows.add(prompt, encoded.prompt_size, supervised=False)
            rows.add(answer, encoded.size - encoded.prompt_size)
            if encoded.ends or rows.full:
                rows.end()
        self._documents[encoded.source] = self._documents.get(encoded.source, 0) + rows.documents - documents
        return True

    def close(self) -> dict[str, Any]:
        """Write what is left; the split's entry for the manifest."""
        entry = self.rows.close()
        if self._by_source and self._last is not None and (last := self._ranges[self._last]) is not None:
            last[1] = self.rows.rows
        whole = [0, self.rows.rows] if len(self._documents) == 1 else None
        entry["sources"] = [
            {"name": name, "documents": count, "rows": self._ranges[name] if self._by_source else whole}
            for name, count in self._documents.items()
        ]
        return entry

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        numbers, arrays = self.rows.state()
        return {"rows": numbers, "documents": self._documents, "ranges": self._ranges, "last": self._last}, arrays

    def restore(self, numbers: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        self.rows.restore(numbers["rows"], arrays)
        self._documents, self._ranges, self._last = numbers["documents"], numbers["ranges"], numbers["last"]


class _State:
    """How far a preparation has come, in memory and in its journal."""

    def __init__(self, journal: Path, parts: Mapping[str, _Part], counts: Counter[str]) -> None:
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


def _take(item: _Item, state: _State, seen: Seen, splits: tuple[str, ...], copies: str) -> None:
    """Write the documents of an item, but for copies and for those of splits that are full."""
    counts, documents = item
    state.counts.update(counts)
    for encoded in documents:
        assert encoded.split in splits
        assert encoded.ends or not encoded.unless  # a part of a document cannot be dropped by itself
        part = state.parts[encoded.split]
        state.bytes += encoded.size
        if part.rows.full:
            continue
        if encoded.unless and seen.any(encoded.unless):
            state.counts[copies] += 1
        elif not part.add(encoded):
            state.counts["too_long"] += 1
        elif encoded.notes:
            seen.note(encoded.notes, state.steps)
    state.items += 1
    state.steps += 1


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

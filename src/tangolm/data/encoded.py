"""Items in chunks, and what other processes make of a chunk: its documents in tokens, one behind the other.

Documents may be a few bytes long, so whatever costs a microsecond or more is done once a chunk and not once a document:
messages between processes, calls of the tokenizer's library, looking up keys, writing rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from tangolm.data.tokenizer import Tokenizer, get_tokenizer

CHUNK_BYTES, CHUNK_ITEMS = 2**18, 1024  # of items that travel to a worker together


class Document(NamedTuple):
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


class Worked(NamedTuple):
    """What came of an item: documents in order, and counts of what was passed over."""

    documents: Sequence[Document]
    counts: Mapping[str, int] = MappingProxyType({})


class Encoded(NamedTuple):
    """A document whose tokens stand elsewhere; the first `prompt` ones are not supervised. Sizes are bytes of text."""

    split: str
    source: str
    tokens: int
    prompt: int
    prompt_size: int
    size: int
    ends: bool
    notes: tuple[int, ...]
    unless: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """The documents of a chunk of items.

    Args:
        items: how many documents came of each item.
        counts: those of the items that have any, by the item's place in the chunk.
        documents: in order.
        tokens: of all documents, one behind the other, without end tokens.
    """

    items: list[int]
    counts: dict[int, Mapping[str, int]]
    documents: list[Encoded]
    tokens: np.ndarray


Chunk = tuple[list[Any], int]  # items and their bytes


def chunks(items: Iterable[Any], weigh: Callable[[Any], int]) -> Iterator[Chunk]:
    """Items that travel together; `weigh` gives the bytes that an item is or stands for."""
    chunk, held = [], 0
    for item in items:
        weight = weigh(item)
        if weight >= CHUNK_BYTES and chunk:  # a large one travels alone: its tokens are not put together with others
            yield chunk, held
            chunk, held = [], 0
        chunk.append(item)
        held += weight
        if held >= CHUNK_BYTES or len(chunk) >= CHUNK_ITEMS:
            yield chunk, held
            chunk, held = [], 0
    if chunk:
        yield chunk, held


def size_of(chunk: Chunk) -> int:
    """Bytes of a chunk."""
    return chunk[1]


def encode(chunk: Chunk, work: Callable[[Any], Worked], tokenizer: str) -> EncodedChunk:
    """Work the items of a chunk, which it is emptied of, and tokenise their documents."""
    worked: list[Worked] = [work(item) for item in chunk[0]]
    chunk[0].clear()  # who reads the results holds the chunk until the next one
    counts = {place: one.counts for place, one in enumerate(worked) if one.counts}
    items, found = [len(one.documents) for one in worked], [document for one in worked for document in one.documents]
    del worked
    documents, tokens = _tokenised(found, get_tokenizer(tokenizer))
    return EncodedChunk(items, counts, documents, tokens)


def _tokenised(documents: Sequence[Document], coder: Tokenizer) -> tuple[list[Encoded], np.ndarray]:
    if any(document.prompt for document in documents):  # a prompt and what follows it are texts of their own
        halves = [half for d in documents for half in (d.text[: d.prompt], d.text[d.prompt :])]
        tokens, lengths = coder.encode_many(halves)
        prompts, totals = lengths[::2].tolist(), (lengths[::2] + lengths[1::2]).tolist()
    else:
        tokens, lengths = coder.encode_many([document.text for document in documents])
        prompts, totals = [0] * len(documents), lengths.tolist()
    encoded = [
        Encoded(d.split, d.source, total, prompt, d.prompt, len(d.text), d.ends, d.notes, d.unless)
        for d, total, prompt in zip(documents, totals, prompts, strict=True)
    ]
    return encoded, tokens

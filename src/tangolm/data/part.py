"""A split that is being written: its rows, and which documents of which source it has."""

from __future__ import annotations

from typing import Any

import numpy as np

from tangolm.data.encoded import Encoded
from tangolm.data.rows import Stream, WholeDocuments

LARGE = 2**18  # tokens of a document that is written by itself, so that it is not copied once more


class Part:
    """The rows of a split; documents of a stream that need no decision of their own are written many at a time.

    Args:
        rows: where they are written.
        context: tokens a row.
        by_source: whether each source begins a row.
    """

    def __init__(self, rows: Stream | WholeDocuments, context: int, by_source: bool) -> None:
        self.rows, self._context, self._by_source = rows, context, by_source
        self._documents: dict[str, int] = {}
        self._ranges: dict[str, list[int] | None] = {}
        self._last: str | None = None
        self._waiting: list[tuple[int, Encoded]] = []  # with the place of the first token
        self._tokens = 0  # of those that wait, end tokens included

    def add(self, encoded: Encoded, first: int, tokens: np.ndarray) -> bool:
        """Take a document whose tokens begin at `first`; False where it is longer than a row that must hold it whole.

        It may wait for `flush`, with the same tokens, but not one that may fill the split.
        """
        rows = self.rows
        alone = self._by_source or not encoded.ends or encoded.prompt_size or encoded.tokens > LARGE
        if isinstance(rows, Stream) and not alone and not rows.open:
            together = self._tokens + encoded.tokens + 1
            if rows.room is None or together < rows.room:
                self._waiting.append((first, encoded))
                self._tokens = together
                return True
        self.flush(tokens)
        return self._write(encoded, tokens[first : first + encoded.tokens])

    def flush(self, tokens: np.ndarray) -> None:
        """Write the documents that wait."""
        if not (waiting := self._waiting):
            return
        assert isinstance(self.rows, Stream)
        firsts, lengths, sizes = np.array([(first, e.tokens, e.size) for first, e in waiting], np.int64).T
        # The tokens from the first document's on, of which those between the documents are another split's.
        gaps = np.diff(firsts + lengths, prepend=firsts[0]) - lengths
        own = np.repeat(np.tile([False, True], len(waiting)), np.stack([gaps, lengths], 1).reshape(-1))
        tokens = tokens[firsts[0] : firsts[-1] + lengths[-1]]
        self.rows.add_many(tokens if own.all() else tokens[own], lengths, int(sizes.sum()))
        for _, encoded in waiting:
            self._documents[encoded.source] = self._documents.get(encoded.source, 0) + (encoded.tokens > 0)
        self._waiting, self._tokens, self._last = [], 0, waiting[-1][1].source

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
        """What a journal keeps of it."""
        assert not self._waiting
        numbers, arrays = self.rows.state()
        return {"rows": numbers, "documents": self._documents, "ranges": self._ranges, "last": self._last}, arrays

    def restore(self, numbers: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Go on from a state that a journal kept."""
        self.rows.restore(numbers["rows"], arrays)
        self._documents, self._ranges, self._last = numbers["documents"], numbers["ranges"], numbers["last"]

    def _write(self, encoded: Encoded, tokens: np.ndarray) -> bool:
        rows, documents = self.rows, self.rows.documents
        prompt, answer = tokens[: encoded.prompt], tokens[encoded.prompt :]
        if isinstance(rows, WholeDocuments) and len(tokens) + 1 > self._context:
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

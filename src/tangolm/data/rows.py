"""Documents to rows of exactly `context` tokens: packed whole, or cut from one stream.

Each document is followed by one end token, which is part of it and is learned. A row that cannot be filled is padded with
further end tokens, each a document of its own of one token and never supervised.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tangolm.data.shards import ShardWriter


class _Filler:
    """A row under construction and the counts of its split."""

    def __init__(self, writer: ShardWriter, context: int, end_token: int) -> None:
        self._writer, self._end = writer, end_token
        self._tokens = np.empty(context, np.int64)
        self._supervised = np.empty(context, bool)
        self._context = context
        self._held = 0
        self.documents = self.bytes = self.supervised_tokens = 0

    @property
    def rows(self) -> int:
        return self._writer.rows

    def break_row(self) -> None:
        """Pad the row that is begun, so that what follows starts a new one."""
        if self._held:
            self._tokens[self._held :] = self._end
            self._supervised[self._held :] = False
            self._write()

    def close(self) -> dict[str, Any]:
        """Pad and write what is left; the split's entry for the manifest but for its sources."""
        self.break_row()
        shards = self._writer.close()
        return {
            "rows": self.rows,
            "tokens": self.rows * self._context,
            "supervised_tokens": self.supervised_tokens,
            "documents": self.documents,
            "bytes": self.bytes,
            "shards": shards,
        }

    def _append(self, tokens: np.ndarray, supervised: np.ndarray | bool) -> None:
        stop = self._held + len(tokens)
        self._tokens[self._held : stop] = tokens
        self._supervised[self._held : stop] = supervised
        self._held = stop
        if stop == self._context:
            self._write()

    def _write(self) -> None:
        self._writer.add(self._tokens, self._supervised)
        self._held = 0


class WholeDocuments(_Filler):
    """Packs documents greedily in the order given; a document that does not fit the row starts the next."""

    def add(self, prompt: np.ndarray, answer: np.ndarray, size: int) -> None:
        """One document: the tokens of a prompt, not supervised, and of its answer, which with the end token is.

        Args:
            size: bytes of its text.

        Raises:
            ValueError: a document longer than a row, or without a prompt (its first token could not be predicted).
        """
        tokens = np.concatenate([prompt, answer, [self._end]])
        if len(tokens) > self._context or not len(prompt):
            raise ValueError(
                f"a document of {len(prompt)} + {len(answer)} + 1 tokens does not fit context {self._context}"
            )
        if self._held + len(tokens) > self._context:
            self.break_row()
        self._append(tokens, np.arange(len(tokens)) >= len(prompt))
        self.documents += 1
        self.supervised_tokens += len(answer) + 1
        self.bytes += size


class Stream(_Filler):
    """Cuts the documents, one behind the other, into rows without a gap; only the last row is padded."""

    def __init__(self, writer: ShardWriter, context: int, end_token: int, document_masking: bool) -> None:
        super().__init__(writer, context, end_token)
        self._masking = document_masking
        self._open = False

    def add(self, tokens: np.ndarray, size: int) -> None:
        """The next tokens of the document that is open, or the first of a new one; `size`: bytes of their text."""
        self.bytes += size
        start = 0
        while start < len(tokens):
            piece = tokens[start : start + self._context - self._held]
            # The first token of a row has no predecessor; with masking, nor has that of a document.
            unpredicted = self._held == 0 or (self._masking and not self._open)
            self.supervised_tokens += len(piece) - unpredicted
            self._open = True
            self._append(piece, True)
            start += len(piece)

    def end(self) -> None:
        """Close the document with its end token; one without any token leaves no end token either."""
        if self._open:
            self.add(np.array([self._end]), 0)
            self.documents += 1
            self._open = False

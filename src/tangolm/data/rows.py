"""Documents to rows of exactly `context` tokens: packed whole, or cut from one stream.

Each document is followed by one end token, which is part of it and is learned. A row that cannot be filled is padded with
further end tokens, each a document of its own of one token and never supervised.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tangolm.data.shards import ShardWriter

_COUNTS = ("documents", "bytes", "supervised_tokens", "stream_tokens", "targets", "target_bytes", "full")


class _Filler:
    """A row under construction and the counts of its split.

    Args:
        limit: at most so many tokens of documents and their end tokens, padding not counted.
    """

    def __init__(self, writer: ShardWriter, context: int, end_token: int, limit: int | None) -> None:
        self._writer, self._end = writer, end_token
        self._tokens = np.empty(context, np.int64)
        self._supervised = np.empty(context, bool)
        self._context = context
        self._held = 0
        self._limit = limit
        self.full = False  # the limit is reached: what is added further is dropped
        self.documents = self.bytes = self.supervised_tokens = 0
        self.stream_tokens = 0  # padding is not among them
        self.targets = self.target_bytes = 0  # tokens to learn, a row's first one among them, and bytes of their text

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
            "bytes_per_token": self.target_bytes / self.targets if self.targets else None,
            "shards": shards,
        }

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """What a journal keeps of it, the writer's state included, between two documents."""
        numbers, arrays = self._writer.state()
        counts = {name: getattr(self, name) for name in _COUNTS}
        row = {"row.tokens": self._tokens[: self._held], "row.supervised": self._supervised[: self._held]}
        return {"writer": numbers, **counts}, arrays | row

    def restore(self, numbers: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Go on from a state that a journal kept.

        Raises:
            ValueError: a shard that was written by then is missing or damaged.
        """
        self._writer.restore(numbers["writer"], arrays)
        for name in _COUNTS:
            setattr(self, name, numbers[name])
        self._held = len(arrays["row.tokens"])
        self._tokens[: self._held] = arrays["row.tokens"]
        self._supervised[: self._held] = arrays["row.supervised"]

    def _append(self, tokens: np.ndarray, supervised: bool) -> None:
        self.stream_tokens += len(tokens)
        start = min(len(tokens), self._context - self._held) if self._held else 0
        if start:
            self._hold(tokens[:start], supervised)
        if whole := (len(tokens) - start) // self._context:
            stop = start + whole * self._context
            self._writer.add_rows(tokens[start:stop].reshape(whole, self._context), supervised)
            start = stop
        if start < len(tokens):
            self._hold(tokens[start:], supervised)

    def _hold(self, tokens: np.ndarray, supervised: np.ndarray | bool) -> None:
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
    """Packs documents greedily in the order given; a document that does not fit the row starts the next.

    The first document that would lead beyond the limit is the end.
    """

    def __init__(self, writer: ShardWriter, context: int, end_token: int, limit: int | None = None) -> None:
        super().__init__(writer, context, end_token, limit)

    def add(self, prompt: np.ndarray, answer: np.ndarray, prompt_size: int, answer_size: int) -> None:
        """One document: the tokens of a prompt, not supervised, and of its answer, which with the end token is.

        Args:
            prompt_size, answer_size: bytes of their texts.

        Raises:
            ValueError: a document longer than a row, or without a prompt (its first token could not be predicted).
        """
        tokens = np.concatenate([prompt, answer, [self._end]])
        if len(tokens) > self._context or not len(prompt):
            raise ValueError(
                f"a document of {len(prompt)} + {len(answer)} + 1 tokens does not fit context {self._context}"
            )
        if self.full or (self._limit is not None and self.stream_tokens + len(tokens) > self._limit):
            self.full = True
            return
        if self._held + len(tokens) > self._context:
            self.break_row()
        self._hold(tokens, np.arange(len(tokens)) >= len(prompt))
        self.stream_tokens += len(tokens)
        self.documents += 1
        self.supervised_tokens += len(answer) + 1
        self.targets += len(answer) + 1
        self.target_bytes += answer_size
        self.bytes += prompt_size + answer_size


class Stream(_Filler):
    """Cuts the documents, one behind the other, into rows without a gap; only the last row is padded.

    The stream ends at its limit exactly, and leaves the document that is cut there without an end token.
    """

    def __init__(
        self, writer: ShardWriter, context: int, end_token: int, document_masking: bool, limit: int | None = None
    ) -> None:
        super().__init__(writer, context, end_token, limit)
        self._masking = document_masking
        self._open = False

    @property
    def open(self) -> bool:
        """Whether a document is begun and not ended."""
        return self._open

    @property
    def room(self) -> int | None:
        """Tokens up to the limit, where there is one."""
        return None if self._limit is None else self._limit - self.stream_tokens

    def add(self, tokens: np.ndarray, size: int, supervised: bool = True) -> None:
        """The next tokens of the document that is open, or the first of a new one.

        Args:
            size: bytes of their text; where the limit cuts the tokens, their share of it counts.
            supervised: whether they are targets of the loss.
        """
        if (room := self.room) is not None and len(tokens) > room:
            size = size * room // len(tokens)
            tokens = tokens[:room]
            self.full = True
        self.bytes += size
        if supervised:
            self.targets += len(tokens)
            self.target_bytes += size
            # The first token of a row has no predecessor; with masking, nor has that of a document.
            begins = self._masking and not self._open and self._held > 0 and len(tokens) > 0
            self.supervised_tokens += len(tokens) - self._rows_begun(len(tokens)) - begins
        self._open = self._open or len(tokens) > 0
        self._append(tokens, supervised)

    def add_many(self, tokens: np.ndarray, lengths: np.ndarray, size: int) -> None:
        """Whole documents, each to be closed by its end token, where none is open and all end before the limit.

        Args:
            tokens: of all of them, one behind the other, every one a target of the loss.
            lengths: tokens of each [documents]; one without any leaves no end token either.
            size: bytes of all their texts.
        """
        lengths = lengths[lengths > 0]
        starts = np.cumsum(lengths + 1) - lengths - 1
        stream = np.full(len(tokens) + len(lengths), self._end, np.promote_types(tokens.dtype, np.uint16))
        inside = np.ones(len(stream), bool)
        inside[starts + lengths] = False
        stream[inside] = tokens
        assert not self._open
        assert self.room is None or len(stream) < self.room
        unpredicted = self._rows_begun(len(stream))
        if self._masking:
            unpredicted += int(np.count_nonzero((starts + self._held) % self._context))
        self.supervised_tokens += len(stream) - unpredicted
        self.targets += len(stream)
        self.target_bytes += size
        self.bytes += size
        self.documents += len(lengths)
        self._append(stream, True)

    def end(self) -> None:
        """Close the document with its end token; one without any token leaves no end token either."""
        if self._open:
            self.add(np.array([self._end]), 0)
            self.documents += 1
            self._open = False
            self.full = self.full or self.stream_tokens == self._limit

    def _rows_begun(self, count: int) -> int:
        """How many of the next `count` tokens are the first of a row."""
        return -(-(self._held + count) // self._context) - (self._held > 0)

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        numbers, arrays = super().state()
        return numbers | {"open": self._open}, arrays

    def restore(self, numbers: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        super().restore(numbers, arrays)
        self._open = numbers["open"]

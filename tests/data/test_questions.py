from __future__ import annotations

from pathlib import Path

import pytest

from tangolm.data import open_split, prepare, questions
from tangolm.data.questions import module_of
from tests.data.tiny import prepare_sums


def test_questions_come_back_with_their_source_and_row(tmp_path: Path) -> None:
    prepare_sums(tmp_path, rows=12)
    found = questions(open_split(tmp_path, "test"))
    assert len(found) == 12
    for number, question in enumerate(found):
        assert bytes(question.prompt_ids) == f"{number}+{number}=\n".encode()
        assert bytes(question.answer_ids) == str(2 * number).encode()
        assert question.row == number
        assert question.source == question.module == ("small" if number < 6 else "large")


def test_running_text_has_no_questions(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("word " * 200)
    prepare("text", tmp_path / "text.txt", tmp_path / "out", context=16)
    with pytest.raises(ValueError, match="running text"):
        questions(open_split(tmp_path / "out", "test"))


def test_the_module_of_a_source() -> None:
    assert module_of("algebra__linear_1d-easy") == module_of("algebra__linear_1d") == "algebra__linear_1d"
    assert module_of(None) is None

"""Rows of recall: every answer follows from the bindings, and from nothing nearer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tangolm.data import open_split, prepare
from tangolm.data.recall import FIRST_BINDING, KEYS, RecallOptions


@pytest.mark.parametrize(
    "options",
    [{}, {"keys": 4, "copies": 1, "context": 91, "spacing": 9}, {"keys": 2, "copies": 3, "context": 15, "spacing": 4}],
)
def test_answers_are_those_of_the_bindings(tmp_path: Path, options: dict[str, int]) -> None:
    manifest = prepare("recall", None, tmp_path / "data", train_rows=20, dev_rows=3, test_rows=3, **options)
    known = RecallOptions(**options)
    assert manifest["splits"]["train"]["supervised_tokens"] == 20 * known.queries
    shifts = set()
    for split in ("train", "dev", "test"):
        opened = open_split(tmp_path / "data", split)
        for row in range(opened.rows):
            tokens, supervised = opened.row(row)
            header = tokens[: known.keys * known.copies] - FIRST_BINDING
            value = dict(zip(header // 8, header % 8, strict=True))
            assert len(value) == known.keys
            assert np.bincount(header).max() == known.copies
            answers = np.flatnonzero(supervised)
            assert len(answers) == known.queries
            assert set(np.diff(answers)) <= {known.spacing}
            shifts.add(int(answers[0]))
            for place in answers:
                assert tokens[place] == ord("0") + value[KEYS.index(int(tokens[place - 1]))]
            assert tokens[-1] == opened.end_token
            assert not supervised[-1]
    assert len(shifts) > 1


def test_seed_alone_decides(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "same", "other")]
    for folder, seed in zip(folders, (5, 5, 6), strict=True):
        prepare("recall", None, folder, train_rows=4, seed=seed)
    one, same, other = ((folder / "train-00000.tokens.npy").read_bytes() for folder in folders)
    assert one == same != other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 192}, "context must be at least 193"),
        ({"keys": 5}, "keys must be at most 4, got 5"),
        ({"copies": 0}, "copies must be at least 1, got 0"),
        ({"spacing": 3}, "spacing must be at least 4, got 3"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare("recall", None, tmp_path / "data", **options)
    assert not (tmp_path / "data").exists()


def test_a_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is generated and reads none"):
        prepare("recall", tmp_path, tmp_path / "data")

"""Answers of a run: what cannot be answered is refused before the test split is met."""

from __future__ import annotations

from pathlib import Path

import pytest

from tangolm.data import mix
from tangolm.experiments.answers import answer_run
from tangolm.training import Run, run_config, train
from tests.training.sums import TINY, prepare_sums


def test_a_mixture_is_refused_before_the_test_evaluation(tmp_path: Path) -> None:
    parts = [prepare_sums(tmp_path / name, questions=40, seed=seed) for seed, name in enumerate("ab")]
    mix(parts, tmp_path / "mixed")
    config = run_config("tango-mini-d4", tmp_path / "mixed", TINY, steps=1, batch_size=4, device="cpu")
    run = Run(train(config, tmp_path / "run", progress=False).folder)
    with pytest.raises(ValueError, match="is a mixture; questions are read from prepared data"):
        answer_run(run)
    assert not (run.folder / "evaluation" / "test.json").exists()

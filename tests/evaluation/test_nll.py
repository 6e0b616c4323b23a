"""NLL of a split: weighted by tokens, whatever the batch size, by module where rows are of one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tangolm.data.loader import evaluation_batches
from tangolm.data.shards import Split, open_split
from tangolm.evaluation.nll import evaluate
from tangolm.models import LanguageModel


class Recited:
    """Gives the NLLs it is told, one row a call."""

    def __init__(self, rows: list[list[float]]) -> None:
        self.training = True
        self._rows = iter(rows)

    def train(self, mode: bool = True) -> Recited:
        self.training = mode
        return self

    def score(self, input_ids: torch.Tensor, labels: torch.Tensor, *, document_ids: Any = None) -> SimpleNamespace:
        assert not self.training
        values = next(self._rows)
        nll = torch.zeros(1, input_ids.shape[1] - 1)
        nll[0, : len(values)] = torch.tensor(values)
        counted = torch.zeros_like(nll, dtype=torch.bool)
        counted[0, : len(values)] = True
        return SimpleNamespace(nll=nll, counted=counted, correct=counted & (nll < 1))


@pytest.mark.case(19)
def test_tokens_weigh_alike_whatever_batch_they_are_in(sums: Path) -> None:
    split = open_split(sums, "dev")
    model = Recited([[2.0], [10.0] * 9])
    result = evaluate(model, split, batch_size=1, limit_rows=2)
    assert (result.nll_sum, result.tokens) == (92.0, 10)
    assert result.nll == pytest.approx(9.2, abs=1e-12)  # not 6.0, the mean of the batches' means
    assert {name: part["nll"] for name, part in result.sources.items()} == {"add": 2.0, "subtract": 10.0}
    assert model.training


@pytest.mark.case(21)
@pytest.mark.parametrize("limit_rows", [None, 5])
def test_batch_size_does_not_show(model: LanguageModel, sums: Path, limit_rows: int | None) -> None:
    split = open_split(sums, "dev")
    assert split.rows % 3 != 0
    results = [evaluate(model, split, size, limit_rows) for size in (1, 3, 8)]
    assert results[0].rows == (limit_rows or split.rows)
    for other in results[1:]:
        assert (other.tokens, other.rows, other.accuracy) == (results[0].tokens, results[0].rows, results[0].accuracy)
        assert other.nll == pytest.approx(results[0].nll, rel=1e-5)
        assert other.sources.keys() == results[0].sources.keys()


def test_it_is_the_models_own_loss(model: LanguageModel, sums: Path) -> None:
    split = open_split(sums, "dev")
    batches = list(evaluation_batches(split, split.rows))
    batch = batches[0]
    with torch.no_grad():
        loss = model(batch.input_ids, labels=batch.labels, document_ids=batch.document_ids).loss
    result = evaluate(model, split)
    assert result.nll == pytest.approx(float(loss), rel=1e-5)
    assert result.tokens == split.entry.supervised_tokens


def test_modules_add_up_and_merge_levels(model: LanguageModel, sums: Path) -> None:
    split = open_split(sums, "dev")
    result = evaluate(model, split)
    assert set(result.sources) == {"add", "subtract"}  # of add-easy and subtract-easy
    for key in ("tokens", "rows"):
        assert sum(part[key] for part in result.sources.values()) == getattr(result, key)
    assert sum(part["nll_sum"] for part in result.sources.values()) == pytest.approx(result.nll_sum, rel=1e-12)
    easy, hard = split.entry.sources
    split.entry = dataclasses.replace(
        split.entry, sources=(easy, dataclasses.replace(hard, name=easy.name.replace("easy", "hard")))
    )
    assert evaluate(model, split).sources["add"]["tokens"] == result.tokens
    assert evaluate(model, open_split(sums, "train")).sources == {}  # rows that mix modules


def test_a_limit_takes_rows_of_every_module(model: LanguageModel, sums: Path) -> None:
    split = open_split(sums, "dev")
    result = evaluate(model, split, limit_rows=4)
    assert result.rows == 4
    assert [part["rows"] for part in result.sources.values()] == [2, 2]
    whole = evaluate(model, split)
    assert evaluate(model, split, limit_rows=split.rows + 5) == whole


@pytest.mark.parametrize("training", [True, False])
def test_the_model_stays_in_its_mode(model: LanguageModel, sums: Path, training: bool) -> None:
    model.train(training)
    evaluate(model, open_split(sums, "dev"))
    assert model.training is training


def test_nothing_supervised_is_refused(model: LanguageModel, sums: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = open_split(sums, "dev")
    row = Split.row
    monkeypatch.setattr(Split, "row", lambda self, index: (row(self, index)[0], row(self, index)[1] & False))
    with pytest.raises(ValueError, match=r"split 'dev' of .* has no supervised tokens in"):
        evaluate(model, split)
    with pytest.raises(ValueError, match="limit_rows must be at least 1, got 0"):
        evaluate(model, split, limit_rows=0)

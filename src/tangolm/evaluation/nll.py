"""Negative log-likelihood of a split: nats per supervised token, token-weighted over all of it.

    NLL = sum over rows of sum over supervised tokens of -ln p(token) / number of those tokens

Token NLLs are float32, sums float64 on the host, so neither the batch size nor the order shows in the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tangolm.data.loader import evaluation_batches
from tangolm.data.questions import module_of
from tangolm.data.shards import Split


class Scorer(Protocol):
    """What evaluation needs of a model: `tangolm.models.LanguageModel` has it."""

    training: bool

    def score(self, input_ids: Tensor, labels: Tensor, *, document_ids: Tensor | None = None) -> Any: ...
    def train(self, mode: bool = True) -> Any: ...


@dataclass(frozen=True)
class Evaluation:
    """NLL of a split.

    Args:
        nll: nats per supervised token.
        nll_sum: nats in all.
        tokens: supervised tokens.
        accuracy: share of them that the model would have chosen.
        rows: of the split that were read.
        sources: the same five by module, where rows are of one module each; empty elsewhere.
    """

    nll: float
    nll_sum: float
    tokens: int
    accuracy: float
    rows: int
    sources: dict[str, dict[str, Any]]


def evaluate(
    model: Scorer,
    split: Split,
    batch_size: int = 8,
    limit_rows: int | None = None,
    device: torch.device | str = "cpu",
) -> Evaluation:
    """Evaluate a model on a split, leaving no trace in the model.

    Args:
        model: on `device`.
        split: of a prepared folder.
        batch_size: rows at a time; it does not change the result.
        limit_rows: take only so many rows, evenly spaced over the split; None: all.
        device: where the model is.

    Raises:
        ValueError: an empty split, rows without supervised tokens, or a limit or batch size below 1.
    """
    rows: list[int] = []
    sums, tokens, hits = [], [], []
    training = model.training
    model.train(False)
    try:
        with torch.no_grad():
            for batch in evaluation_batches(split, batch_size, limit_rows):
                documents = None if batch.document_ids is None else batch.document_ids.to(device)
                score = model.score(batch.input_ids.to(device), batch.labels.to(device), document_ids=documents)
                rows += batch.sample_ids.tolist()
                sums.append(score.nll.to("cpu", torch.float64).sum(1).numpy())
                tokens.append(score.counted.sum(1).cpu().numpy())
                hits.append(score.correct.sum(1).cpu().numpy())
    finally:
        model.train(training)
    sums, tokens, hits = np.concatenate(sums), np.concatenate(tokens), np.concatenate(hits)
    if not tokens.any():
        raise ValueError(
            f"split {split.name!r} of {str(split.folder)!r} has no supervised tokens in {len(rows)} rows; take more"
        )
    modules: dict[str, list[int]] = {}
    of_row = _modules(split)
    for index, row in enumerate(rows):
        module = of_row[row]
        if module is not None and tokens[index]:
            modules.setdefault(module, []).append(index)
    sources = {module: _summary(sums[at], tokens[at], hits[at]) for module, at in sorted(modules.items())}
    return Evaluation(**_summary(sums, tokens, hits), sources=sources)


def _summary(sums: np.ndarray, tokens: np.ndarray, hits: np.ndarray) -> dict[str, Any]:
    total, count = math.fsum(sums), int(tokens.sum())
    return {
        "nll": total / count,
        "nll_sum": total,
        "tokens": count,
        "accuracy": int(hits.sum()) / count,
        "rows": len(tokens),
    }


def _modules(split: Split) -> list[str | None]:
    """The module of each row, None where a row mixes several."""
    names: list[str | None] = [None] * split.rows
    for source in split.entry.sources:
        if source.rows is not None:
            first, end = source.rows
            names[first:end] = [module_of(source.name)] * (end - first)
    return names

"""Negative log-likelihood of a split: nats per supervised token, token-weighted over all of it.

    NLL = sum over rows of sum over supervised tokens of -ln p(token) / number of those tokens

The joint NLL of a mixture is the arithmetic mean of its parts'.

Token NLLs are float32, sums float64 on the host, so neither the batch size nor the order shows in the result.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tangolm.data.loader import batches, check_split, evaluation_rows
from tangolm.data.mixture import MixedSplit
from tangolm.data.questions import module_of
from tangolm.data.shards import Split


class Processes(Protocol):
    """What evaluation needs of several processes: `tangolm.training.distributed.World` has it."""

    def share(self, count: int) -> range: ...
    def largest_share(self, count: int) -> int: ...
    def sum(self, values: Tensor) -> Tensor: ...


class Scorer(Protocol):
    """What evaluation needs of a model: `tangolm.models.LanguageModel` has it."""

    training: bool

    def score(self, input_ids: Tensor, labels: Tensor, *, document_ids: Tensor | None = None) -> Any: ...
    def train(self, mode: bool = True) -> Any: ...


@dataclass(frozen=True)
class Evaluation:
    """NLL of a split.

    Args:
        nll: nats per supervised token; of a mixture the mean of its parts', each of which weighs the same.
        nll_sum: nats in all.
        tokens: supervised tokens.
        accuracy: share of them that the model would have chosen; of a mixture the mean of its parts'.
        rows: of the split that were read.
        sources: the same five by module, where rows are of one module each; empty elsewhere.
        parts: the same five by part of a mixture; empty elsewhere.
    """

    nll: float
    nll_sum: float
    tokens: int
    accuracy: float
    rows: int
    sources: dict[str, dict[str, Any]]
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)


def evaluate(
    model: Scorer,
    split: Split | MixedSplit,
    batch_size: int = 8,
    limit_rows: int | None = None,
    device: torch.device | str = "cpu",
    processes: Processes | None = None,
) -> Evaluation:
    """Evaluate a model on a split, leaving no trace in the model.

    Args:
        model: on `device`.
        split: of a prepared folder, or of a mixture.
        batch_size: rows at a time; it does not change the result.
        limit_rows: take only so many rows, evenly spaced over the split (or over each part of it); None: all.
        device: where the model is.
        processes: evaluate together with others, of which each reads its share of the rows; all get the whole result.

    Raises:
        ValueError: an empty split, rows without supervised tokens, or a limit or batch size below 1.
    """
    if isinstance(split, MixedSplit):
        return _joint(
            {
                name: evaluate(model, part, batch_size, limit_rows, device, processes)
                for name, part in split.parts.items()
            }
        )
    check_split(split, batch_size)
    rows = evaluation_rows(split, limit_rows)
    table = torch.zeros((len(rows), 3), dtype=torch.float64)  # of each row: nats, supervised tokens, hits
    own = range(len(rows)) if processes is None else processes.share(len(rows))
    read = [rows[index] for index in own]
    if processes is not None:
        # Every process makes the same passes, since a sharded model is gathered in each: another row fills a gap.
        read += rows[:1] * (processes.largest_share(len(rows)) - len(own))
    results = []
    training = model.training
    model.train(False)
    try:
        with torch.no_grad():
            for batch in batches(split, batch_size, read):
                documents = None if batch.document_ids is None else batch.document_ids.to(device)
                score = model.score(batch.input_ids.to(device), batch.labels.to(device), document_ids=documents)
                columns = score.nll.to("cpu", torch.float64).sum(1), score.counted.sum(1), score.correct.sum(1)
                results.append(torch.stack([column.to("cpu", torch.float64) for column in columns], 1))
    finally:
        model.train(training)
    table[own.start : own.stop] = torch.cat(results)[: len(own)]
    if processes is not None:
        processes.sum(table)
    sums, tokens, hits = table[:, 0].numpy(), table[:, 1].long().numpy(), table[:, 2].long().numpy()
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


def _joint(parts: dict[str, Evaluation]) -> Evaluation:
    records = {name: dataclasses.asdict(part) for name, part in parts.items()}
    for record in records.values():
        del record["sources"], record["parts"]
    return Evaluation(
        nll=math.fsum(part.nll for part in parts.values()) / len(parts),
        nll_sum=math.fsum(part.nll_sum for part in parts.values()),
        tokens=sum(part.tokens for part in parts.values()),
        accuracy=math.fsum(part.accuracy for part in parts.values()) / len(parts),
        rows=sum(part.rows for part in parts.values()),
        sources={f"{name}/{module}": own for name, part in parts.items() for module, own in part.sources.items()},
        parts=records,
    )


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

"""One optimizer step: the gradient of the mean NLL over all supervised tokens of the batch, in pieces that fit.

With pieces p of n_p supervised tokens each, n = sum n_p:    loss = sum_p (n_p / n) * loss_p

so that accumulation gives the gradient of the whole batch, however unevenly the tokens lie. Over several processes the pieces
are those of all, of which each has some; all make the same number of passes, a process with fewer pieces some without a loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tangolm.data.loader import Batch
from tangolm.models import supervised
from tangolm.training.distributed import Parallel, whole
from tangolm.training.environment import Place


class NonFinite(ValueError):
    """A loss or gradient that is not a finite number; the weights are untouched."""


@dataclass(frozen=True)
class Update:
    """Mean NLL over the batch before the step, norm of its gradient before clipping, supervised tokens."""

    loss: float
    grad_norm: float
    tokens: int


def update(
    parallel: Parallel,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    lr: float,
    clip: float | None,
    micro_batch: int,
    place: Place,
    passes: int | None = None,
) -> Update:
    """Take one optimizer step on a batch.

    Args:
        parallel: the model, of which every process takes the step.
        optimizer: over its parameters; gradients are zeroed first.
        batch: this process's sequences of the step, on the CPU.
        lr: learning rate of this step.
        clip: largest norm of the gradient; None: no clipping.
        micro_batch: sequences of one forward and backward pass.
        place: device and precision.
        passes: forward and backward passes that every process makes; None: as many as the batch needs.

    Raises:
        NonFinite: before the weights are touched, in every process.
    """
    optimizer.zero_grad(set_to_none=True)
    loss, tokens = accumulate(parallel, batch, micro_batch=micro_batch, place=place, passes=passes)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    grad_norm = float(whole(nn.utils.clip_grad_norm_(parameters, math.inf if clip is None else clip)))
    for name, value in (("loss", loss), ("gradient norm", grad_norm)):
        if not math.isfinite(value):
            raise NonFinite(f"{name} is {value}")
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return Update(loss, grad_norm, tokens)


def accumulate(
    parallel: Parallel,
    batch: Batch,
    *,
    micro_batch: int,
    place: Place,
    passes: int | None = None,
) -> tuple[float, int]:
    """Add the gradient of the mean NLL over the batches of all processes to the parameters.

    Returns:
        That mean, and its supervised tokens.
    """
    pieces = list(_pieces(batch, micro_batch))
    while passes is not None and len(pieces) < passes:
        pieces.append(_silent(pieces[0]))
    counts = [int(supervised(labels, document_ids=document_ids).sum()) for _, labels, document_ids in pieces]
    tokens = int(parallel.world.sum(torch.tensor(sum(counts))))
    total = torch.zeros((), dtype=torch.float32, device=place.device)
    for number, ((input_ids, labels, document_ids), count) in enumerate(zip(pieces, counts, strict=True), start=1):
        with parallel.exchanging(last=number == len(pieces)):
            with place.autocast():
                output = parallel.passes(
                    input_ids.to(place.device),
                    labels=labels.to(place.device),
                    document_ids=None if document_ids is None else document_ids.to(place.device),
                )
            loss = output.loss * (count / max(1, tokens))
            (loss * parallel.world.size).backward()  # what is exchanged is averaged, and the loss is a sum
        total += loss.detach()
    return float(parallel.world.sum(total.to("cpu", torch.float64))), tokens


Piece = tuple[Tensor, Tensor, Tensor | None]


def _pieces(batch: Batch, size: int) -> Iterator[Piece]:
    for start in range(0, batch.input_ids.shape[0], size):
        rows = slice(start, start + size)
        documents = None if batch.document_ids is None else batch.document_ids[rows]
        yield batch.input_ids[rows], batch.labels[rows], documents


def _silent(piece: Piece) -> Piece:
    """The first sequence of a piece with nothing to predict: its gradient is zero."""
    input_ids, labels, documents = piece
    return input_ids[:1], torch.full_like(labels[:1], -100), None if documents is None else documents[:1]

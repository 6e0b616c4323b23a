"""One optimizer step: the gradient of the mean NLL over all supervised tokens of the batch, in pieces that fit.

With pieces p of n_p supervised tokens each, n = sum n_p:    loss = sum_p (n_p / n) * loss_p

so that accumulation gives the gradient of the whole batch, however unevenly the tokens lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tangolm.data.loader import Batch
from tangolm.models import supervised


class NonFinite(ValueError):
    """A loss or gradient that is not a finite number; the weights are untouched."""


@dataclass(frozen=True)
class Update:
    """Mean NLL over the batch before the step, norm of its gradient before clipping, supervised tokens."""

    loss: float
    grad_norm: float
    tokens: int


def update(
    model: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    lr: float,
    clip: float | None,
    micro_batch: int,
    device: torch.device,
    precision: Callable[[], AbstractContextManager[Any]],
) -> Update:
    """Take one optimizer step on a batch.

    Args:
        model: called as a `LanguageModel`; a compiled one is too.
        optimizer: over its parameters; gradients are zeroed first.
        batch: sequences of the whole step, on the CPU.
        lr: learning rate of this step.
        clip: largest norm of the gradient; None: no clipping.
        micro_batch: sequences of one forward and backward pass.
        device: where the model is.
        precision: a context for the forward passes, such as autocast.

    Raises:
        NonFinite: before the weights are touched.
    """
    optimizer.zero_grad(set_to_none=True)
    loss, tokens = accumulate(model, batch, micro_batch=micro_batch, device=device, precision=precision)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    grad_norm = float(nn.utils.clip_grad_norm_(parameters, math.inf if clip is None else clip))
    for name, value in (("loss", loss), ("gradient norm", grad_norm)):
        if not math.isfinite(value):
            raise NonFinite(f"{name} is {value}")
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return Update(loss, grad_norm, tokens)


def accumulate(
    model: Callable[..., Any],
    batch: Batch,
    *,
    micro_batch: int,
    device: torch.device,
    precision: Callable[[], AbstractContextManager[Any]],
) -> tuple[float, int]:
    """Add the gradient of the batch's mean NLL to the parameters; return that mean and its supervised tokens."""
    pieces = list(_pieces(batch, micro_batch))
    counts = [int(supervised(labels, document_ids=document_ids).sum()) for _, labels, document_ids in pieces]
    tokens = sum(counts)
    total = torch.zeros((), dtype=torch.float32, device=device)
    for (input_ids, labels, document_ids), count in zip(pieces, counts, strict=True):
        with precision():
            output = model(
                input_ids.to(device),
                labels=labels.to(device),
                document_ids=None if document_ids is None else document_ids.to(device),
            )
        loss = output.loss * (count / max(1, tokens))
        loss.backward()
        total += loss.detach()
    return float(total), tokens


def _pieces(batch: Batch, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    for start in range(0, batch.input_ids.shape[0], size):
        rows = slice(start, start + size)
        documents = None if batch.document_ids is None else batch.document_ids[rows]
        yield batch.input_ids[rows], batch.labels[rows], documents

"""The language-model head and its loss without the T x V logits: cross-entropy by blocks of rows.

    nll = sum_t (logsumexp(h_t E^T) - h_t E_(y_t)^T)         d nll / d logits_t = softmax(h_t E^T) - onehot(y_t)

A block's logits exist once: the forward pass takes its loss and, where a gradient will be asked for, its share of dh and dE
from them, so that nothing is recomputed and only dh and dE are kept. Logits are rounded to the compute dtype (autocast's where
that is on); softmax, loss and dE are formed in at least float32. One block where all logits are small.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_LOGITS = 2**24  # logits that exist at a time: 64 MB in float32
IGNORED = -100


def head_nll(
    hidden: Float[Tensor, "R d"], embedding: Float[Tensor, "V d"], targets: Int[Tensor, " R"], vocab_size: int
) -> Float[Tensor, " "]:
    """The sum of the NLL of `targets` in nats, those of -100 left out, in at least float32.

    Args:
        hidden: what the head multiplies by the embedding.
        embedding: rows from `vocab_size` on are padding and give no logits.
        targets: below `vocab_size`, or -100.
    """
    return _HeadNll.apply(hidden, embedding, targets, vocab_size)


class _HeadNll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, embedding: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        needs_hidden, needs_embedding = ctx.needs_input_grad[:2]
        rows = max(1, BLOCK_LOGITS // vocab_size)
        known = embedding[:vocab_size]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_embedding = torch.zeros(embedding.shape, dtype=wide, device=embedding.device) if needs_embedding else None
        nll = torch.zeros((), dtype=wide, device=hidden.device)
        for start in range(0, hidden.shape[0], rows):
            block, target = hidden[start : start + rows], targets[start : start + rows]
            logits = F.linear(block, known)
            compute, logits = logits.dtype, logits.to(wide)
            counted = target != IGNORED
            index = target.clamp(min=0)[:, None]
            normaliser = logits.logsumexp(dim=1, keepdim=True)
            nll += ((normaliser - logits.gather(1, index))[:, 0] * counted).sum()
            if grad_hidden is None and grad_embedding is None:
                continue
            slope = logits.sub_(normaliser).exp_()  # the logits' gradient, in their place
            slope.scatter_add_(1, index, slope.new_full((1, 1), -1.0).expand(index.shape))
            slope = slope.mul_(counted[:, None]).to(compute)
            if grad_hidden is not None:
                grad_hidden[start : start + rows] = slope @ known.to(compute)
            if grad_embedding is not None:
                if compute == wide:
                    grad_embedding[:vocab_size].addmm_(slope.t(), block.to(compute))
                else:
                    grad_embedding[:vocab_size] += slope.t() @ block.to(compute)
        ctx.save_for_backward(grad_hidden, grad_embedding)
        ctx.dtype = embedding.dtype
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_hidden, grad_embedding = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad.to(grad_hidden.dtype)
        if grad_embedding is not None:
            grad_embedding = (grad_embedding * grad).to(ctx.dtype)
        return grad_hidden, grad_embedding, None, None

"""The language-model head and its loss without the T x V logits: cross-entropy by blocks of rows.

    nll = sum_t (logsumexp(h_t E^T) - h_t E_(y_t)^T)         d nll / d logits_t = softmax(h_t E^T) - onehot(y_t)

A block's logits exist once: the forward pass takes its loss and, where a gradient will be asked for, its share of dh and dE
from them, so that nothing is recomputed and only dh and dE are kept. Products are of the compute dtype (autocast's where that
is on); softmax, loss and the sum over blocks are of at least float32. Small logits are one block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tangolm.ops.operators import register

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
    kind = hidden.device.type
    compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    wanted = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden, embedding)]
    return torch.ops.tangolm.head_nll(hidden, embedding, targets, vocab_size, compute, *wanted)[0]


def forward(
    hidden: Tensor,
    embedding: Tensor,
    targets: Tensor,
    vocab_size: int,
    compute: torch.dtype,
    with_hidden: bool,
    with_embedding: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the operator `tangolm::head_nll` does: the sum and its gradients, empty where not wanted."""
    wide = torch.promote_types(compute, torch.float32)
    nll, grad_hidden, grad_embedding = _empty(hidden, embedding, with_hidden, with_embedding, wide)
    nll.zero_()
    grad_embedding.zero_()
    rows = max(1, BLOCK_LOGITS // vocab_size)
    with torch.autocast(hidden.device.type, enabled=False):
        known = embedding[:vocab_size].to(compute)
        for start in range(0, hidden.shape[0], rows):
            block, target = hidden[start : start + rows].to(compute), targets[start : start + rows]
            logits = F.linear(block, known).to(wide)
            counted, index = target != IGNORED, target.clamp(min=0)[:, None]
            normaliser = logits.logsumexp(dim=1, keepdim=True)
            nll += ((normaliser - logits.gather(1, index))[:, 0] * counted).sum()
            if not (with_hidden or with_embedding):
                continue
            slope = logits.sub_(normaliser).exp_()  # the gradient of the logits, in their place
            slope.scatter_add_(1, index, slope.new_full((1, 1), -1.0).expand(index.shape))
            slope = slope.mul_(counted[:, None]).to(compute)
            if with_hidden:
                grad_hidden[start : start + rows] = slope @ known
            if with_embedding and compute == wide:
                grad_embedding[:vocab_size].addmm_(slope.t(), block)
            elif with_embedding:
                grad_embedding[:vocab_size] += slope.t() @ block
    return nll, grad_hidden, grad_embedding


def _empty(
    hidden: Tensor, embedding: Tensor, with_hidden: bool, with_embedding: bool, wide: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty((), dtype=wide),
        hidden.new_empty(hidden.shape if with_hidden else (0,)),
        embedding.new_empty(embedding.shape if with_embedding else (0,), dtype=wide),
    )


def _shapes(hidden, embedding, targets, vocab_size, compute, with_hidden, with_embedding):
    wide = torch.promote_types(compute, torch.float32)
    return _empty(hidden, embedding, with_hidden, with_embedding, wide)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.dtype, ctx.wanted = inputs[1].dtype, inputs[5:]


def _differentiate(ctx, grad, *_):
    grad_hidden, grad_embedding = ctx.saved_tensors
    with_hidden, with_embedding = ctx.wanted
    return (
        grad_hidden * grad.to(grad_hidden.dtype) if with_hidden else None,
        (grad_embedding * grad).to(ctx.dtype) if with_embedding else None,
        *[None] * 5,
    )


register("tangolm::head_nll", forward, _shapes, _differentiate, _save)

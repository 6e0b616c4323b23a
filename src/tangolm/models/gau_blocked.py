"""GAU's sum over sources by blocks of destinations, with a hand-written backward that recomputes the weights.

    r = relu(q k^T / L + bias)    A = r^2    y = A v                        (per block; A rounded once to the dtype of v)
    dA = dy v^T    ds = 2 r dA    dv = A^T dy
    dq = ds k / L    dk = ds^T q / L    dbias_n = sum of ds over i - j = n

Sources after the last destination of a block are skipped, and nothing of size T x S is kept.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tangolm.models.gated_unit import bias_at
from tangolm.ops.operators import register
from tangolm.ops.reference import visible


def blocked(
    query: Float[Tensor, "B T s"],
    key: Float[Tensor, "B S s"],
    value: Float[Tensor, "B S e"],
    bias: Float[Tensor, " entries"],
    document_ids: Int[Tensor, "B S"] | None,
    mask: Bool[Tensor, "B S"] | None,
    positions: Int[Tensor, "B S"] | None,
) -> Float[Tensor, "B T e"]:
    """A v for the last T of S sources; arguments as in `tangolm.models.gau.reference`."""
    return torch.ops.tangolm.gau(query, key, value, bias, document_ids, mask, positions)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    document_ids: Tensor | None,
    mask: Tensor | None,
    positions: Tensor | None,
) -> Tensor:
    """What the operator `tangolm::gau` does; compilers see it whole, with its shapes and derivative."""
    with torch.autocast(query.device.type, enabled=False):
        blocks = Blocks(query, key, bias, document_ids, mask, positions)
        out = value.new_empty((*query.shape[:2], value.shape[2]))
        for top, end in blocks:
            weights = blocks.roots(top, end).square_().to(value.dtype)
            out[:, top:end] = weights @ value[:, : blocks.past + end]
        return out


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    document_ids: Tensor | None,
    mask: Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and bias from the gradient of A v."""
    with torch.autocast(query.device.type, enabled=False):
        blocks = Blocks(query, key, bias, document_ids, mask, positions)
        grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        grad_key, grad_value, grad_bias = (x.new_zeros(x.shape, dtype=query.dtype) for x in (key, value, bias))
        for top, end in blocks:
            last = blocks.past + end
            roots, dy = blocks.roots(top, end), grad[:, top:end]
            scores = (dy @ value[:, :last].transpose(1, 2)).to(query.dtype).mul_(roots).mul_(2 / blocks.context)
            grad_value[:, :last] += roots.square_().to(value.dtype).transpose(1, 2) @ dy
            grad_query[:, top:end] = scores @ key[:, :last]
            grad_key[:, :last] += scores.transpose(1, 2) @ query[:, top:end]
            blocks.add_bias_gradient(grad_bias, scores, top, end)
        return grad_query, grad_key, grad_value.to(value.dtype), grad_bias.mul_(blocks.context).to(bias.dtype)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, grad):
    return *torch.ops.tangolm.gau_backward(grad, *ctx.saved_tensors), None, None, None


def _differentiate_again(ctx, *grads):
    raise NotImplementedError("impl 'blocked' has no second derivative; impl='reference' has")


register(
    "tangolm::gau",
    forward,
    lambda query, key, value, *_: value.new_empty((*query.shape[:2], value.shape[2])),
    _differentiate,
    _save,
)
register(
    "tangolm::gau_backward",
    backward,
    lambda _, *inputs: tuple(tensor.new_empty(tensor.shape) for tensor in inputs[:4]),
    _differentiate_again,
)


@register_flop_formula(torch.ops.tangolm.gau)
def _forward_flops(query, key, value, *_, **__) -> int:
    """What the reference counts: all T x S pairs, though about half of them are skipped."""
    batch, queries, width = query
    return 2 * batch * queries * key[1] * (width + value[2])


@register_flop_formula(torch.ops.tangolm.gau_backward)
def _backward_flops(_, query, key, value, *__, **___) -> int:
    """Two products for each of the forward's; the recomputed scores are not counted."""
    return 2 * _forward_flops(query, key, value)


class Blocks:
    """Blocks of destinations; iterating gives their first and last rows."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        bias: Tensor,
        document_ids: Tensor | None,
        mask: Tensor | None,
        positions: Tensor | None,
    ) -> None:
        self.query, self.key, self.bias = query, key, bias.to(query.dtype)
        self.document_ids, self.mask, self.positions = document_ids, mask, positions
        self.context = (bias.shape[0] + 1) // 2
        self.past = key.shape[1] - query.shape[1]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        tokens = self.query.shape[1]
        rows = 256 if tokens > 1024 else 128 if tokens > 256 else 64  # measured on a CPU
        return ((top, min(top + rows, tokens)) for top in range(0, tokens, rows))

    def roots(self, top: int, end: int) -> Float[Tensor, "B rows sources"]:
        """relu(q k^T / L + bias) of destinations top..end and the sources up to the last of them; 0 where not seen."""
        last = self.past + end
        rows, key = end - top, self.key[:, :last]
        scores = self.query[:, top:end] @ key.transpose(1, 2) / self.context
        if self.positions is None:
            # Row i of a Toeplitz matrix is a window of one vector, a place further to the left than row i - 1.
            entries = self.bias[self._entries(top, end)].flip(0)
            scores = scores + entries.unfold(0, last, 1).flip(0)
        else:
            scores = scores + bias_at(self._distance(top, end), self.bias, scores.dtype)
        document_ids, mask = (None if x is None else x[:, :last] for x in (self.document_ids, self.mask))
        return scores.masked_fill(~visible(rows, last, document_ids, mask, key.device), 0.0).relu()

    def add_bias_gradient(self, dbias: Tensor, dscores: Float[Tensor, "B rows sources"], top: int, end: int) -> None:
        """Add the sums of `dscores` over pairs of equal distance."""
        if self.positions is None:
            # Shear: a row more of padding than of shift moves equal distances into one column.
            rows, sources = dscores.shape[1:]
            sheared = F.pad(dscores.sum(0).flip(0), (0, rows)).flatten()[: rows * (rows + sources - 1)]
            dbias[self._entries(top, end)] += sheared.view(rows, -1).sum(0).flip(0)
        else:
            entries = (self._distance(top, end) + self.context - 1).clamp(min=0)
            dbias.index_add_(0, entries.flatten(), dscores.flatten())

    def _entries(self, top: int, end: int) -> slice:
        """The entries of the bias for distances -(rows - 1) .. past + end - 1."""
        return slice(self.context - (end - top), self.context + self.past + end - 1)

    def _distance(self, top: int, end: int) -> Int[Tensor, "B rows sources"]:
        assert self.positions is not None
        last = self.past + end
        return self.positions[:, self.past + top : last, None] - self.positions[:, None, :last]

"""The gate averaging by blocks of destinations, with a hand-written backward that recomputes the weights.

A tile holds the finished weights of a block of destinations on all their sources, [heads, rows, sources]. Tiles fit the
cache and nothing of size T x S is kept: forward and backward each form them from queries and keys, which is cheap because
a key is far narrower than a gate. The large products run head by head on views of the gates, without a copy.

    s  = tau q k^T    P = softmax(s)    y = P g                           (P rounded once to the dtype of g)
    dP = dy g^T       ds = P * (dP - rowsum(P * dP))                       (tile by tile)
    dq = tau ds k     dk = tau ds^T q   dtau = sum(ds * q k^T)    dg = P^T dy

Sources after a tile's last destination are skipped, and a quarter of its diagonal square where that costs no rounding. On a
CPU, documents that ended before the tile are skipped too. With `silu` the operand is a and g = SiLU(a), which is formed for
one group of heads at a time in both directions; only a is kept. Departs from the paper in nothing.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tangolm.ops import reference
from tangolm.ops.operators import register
from tangolm.ops.tiles import Tiles


def aggregate_gates(
    query: Float[Tensor, "B T H D"],
    key: Float[Tensor, "B S H D"],
    gate: Float[Tensor, "B S H E"],
    temperature: Float[Tensor, "H"],
    document_ids: Int[Tensor, "B S"] | None,
    mask: Bool[Tensor, "B S"] | None,
    silu: bool = False,
) -> Float[Tensor, "B T H E"]:
    """Average the gates for the last T of S sources; arguments as in `tangolm.ops.aggregate_gates`, state already joined."""
    if query.shape[1] == 1 and (gate.dtype.itemsize >= 4 or gate.device.type != "cpu"):
        # One destination (a step of generation) leaves nothing to skip: the equation itself is the fastest form. But a CPU's
        # batched product of one row in half precision can take five times as long as head by head.
        return reference.aggregate_gates(query, key, gate, temperature, document_ids, mask, silu)
    return torch.ops.tangolm.aggregate_gates(query, key, gate, temperature, document_ids, mask, silu)


def forward(
    query: Tensor,
    key: Tensor,
    gate: Tensor,
    temperature: Tensor,
    document_ids: Tensor | None,
    mask: Tensor | None,
    silu: bool,
) -> Tensor:
    """What the operator `tangolm::aggregate_gates` does; compilers see it whole, with its shapes and derivative."""
    tiles = Tiles(query, key, temperature, document_ids, mask, gate.shape[3] if silu else None)
    gates = _Gates(tiles, _unit_stride(gate), silu)
    out = gate.new_empty((*query.shape[:3], gate.shape[3]))
    for heads in tiles.groups():
        rows = gates.rows(heads)
        for top, bottom in tiles.blocks():
            first, weights = tiles.weights(heads, top, bottom)
            last = first + weights.shape[2]
            weights = weights.to(gate.dtype)
            for row, index, columns, own in rows:
                start = tiles.first(row, top)
                _average(weights[index, :, start - first :], own[start:last], out[row, top:bottom, columns])
    return out


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    gate: Tensor,
    temperature: Tensor,
    document_ids: Tensor | None,
    mask: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `tangolm::aggregate_gates_backward` does: the gradients of query, key, gate and temperature."""
    tiles = Tiles(query, key, temperature, document_ids, mask, gate.shape[3] if silu else None)
    past, strip_rows = tiles.past, tiles.strip_rows
    grad_query = torch.empty_like(tiles.query)  # [B * H, T, D], of the scaled queries
    grad_key = torch.zeros_like(tiles.key).transpose(1, 2).contiguous()  # [B * H, D, S], the faster way round
    grad_gate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    grad_gate[:, :past] = 0
    grad, gate = _unit_stride(grad), _unit_stride(gate)
    gates = _Gates(tiles, gate, silu)
    products = gate.new_empty(tiles.size)
    kept_weights = gate.new_empty(tiles.group * min(strip_rows, tiles.queries) * tiles.sources)
    for heads in tiles.groups():
        joint, rows = slice(*heads), gates.rows(heads)
        for above in range(0, tiles.queries, strip_rows):
            below = min(above + strip_rows, tiles.queries)
            kept = tiles.tile(kept_weights, (heads[1] - heads[0], below - above, past + below))
            if tiles.skips:
                kept.zero_()
            for top, bottom in tiles.blocks(above, below):
                first, weights = tiles.weights(heads, top, bottom)
                last = first + weights.shape[2]
                kept[:, top - above : bottom - above, first:last] = weights
                grad_weights = tiles.tile(products, weights.shape)
                for row, index, columns, own in rows:
                    start = tiles.first(row, top)
                    if start > first:
                        grad_weights[index, :, : start - first] = 0
                    _grad_weights(
                        grad[row, top:bottom, columns], own[start:last], grad_weights[index, :, start - first :]
                    )
                scores = tiles.softmax_backward(grad_weights, weights)
                torch.bmm(scores, tiles.key[joint, first:last], out=grad_query[joint, top:bottom])
                grad_key[joint, :, first:last].baddbmm_(tiles.query[joint, top:bottom].transpose(1, 2), scores)
            for row, index, columns, _ in rows:
                start, middle = tiles.first(row, above), past + above
                if start < middle:  # sources before the strip; earlier strips have written or cleared them
                    _add_grad_gate(
                        kept[index, :, start:middle],
                        grad[row, above:below, columns],
                        grad_gate[row, start:middle, columns],
                    )
                for top, bottom in tiles.blocks(above, below):
                    end = tiles.end(row, bottom, below)
                    _grad_gate(
                        kept[index, top - above : end - above, past + top : past + bottom],
                        grad[row, top:end, columns],
                        grad_gate[row, past + top : past + bottom, columns],
                    )
        if silu:
            for row, _, columns, _ in rows:
                own = grad_gate[row, :, columns]
                torch.ops.aten.silu_backward(own, gate[row, :, columns], grad_input=own)
    scaled = grad_query.view(tiles.batch, tiles.heads, tiles.queries, -1).transpose(1, 2)
    grad_temperature = (scaled * query).sum((0, 1, 3)).to(temperature.dtype)
    scaled = (scaled * temperature.to(scaled.dtype)[:, None]).to(query.dtype).contiguous()
    back = grad_key.view(tiles.batch, tiles.heads, -1, tiles.sources).permute(0, 3, 1, 2)
    return scaled, back.to(key.dtype).contiguous(), grad_gate, grad_temperature


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, grad):
    return *torch.ops.tangolm.aggregate_gates_backward(grad, *ctx.saved_tensors, ctx.silu), None, None, None


def _differentiate_again(ctx, *grads):
    raise NotImplementedError("impl 'chunked' has no second derivative; impl='reference' has")


register(
    "tangolm::aggregate_gates",
    forward,
    lambda query, key, gate, *_: gate.new_empty((*query.shape[:3], gate.shape[3])),
    _differentiate,
    _save,
)
register(
    "tangolm::aggregate_gates_backward",
    backward,
    lambda _, *inputs: tuple(tensor.new_empty(tensor.shape) for tensor in inputs[:4]),
    _differentiate_again,
)


@register_flop_formula(torch.ops.tangolm.aggregate_gates)
def _forward_flops(query, key, gate, *_, **__) -> int:
    """What the reference counts: all T x S pairs, though about half of them are skipped."""
    batch, queries, heads, width = query
    return 2 * batch * heads * queries * key[1] * (width + gate[3])


@register_flop_formula(torch.ops.tangolm.aggregate_gates_backward)
def _backward_flops(_, query, key, gate, *__, **___) -> int:
    """Two products for each of the forward's; the recomputed scores are not counted."""
    return 2 * _forward_flops(query, key, gate)


class _Gates:
    """The gates of a group of heads as the products take them: views of those given, or their SiLU in a buffer."""

    def __init__(self, tiles: Tiles, gate: Tensor, silu: bool) -> None:
        self._tiles, self._gate = tiles, gate
        self._buffer = gate.new_empty((tiles.group, tiles.sources * gate.shape[3])) if silu else None

    def rows(self, heads: tuple[int, int]) -> list[tuple[int, slice, slice, Tensor]]:
        """`Tiles.batch_rows` with the gates [sources, heads, E] of each row's part; valid until the next call."""
        rows = []
        for row, index, columns in self._tiles.batch_rows(heads):
            own = self._gate[row, :, columns]
            if self._buffer is not None:
                own = torch.ops.aten.silu(own, out=self._buffer[index].view(own.shape))
            rows.append((row, index, columns, own))
        return rows


def _unit_stride(tensor: Tensor) -> Tensor:
    """The tensor, copied where its last axis is not contiguous (expanded or transposed)."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


# The products of some heads of one batch row, all in place or into `out`, which autocast leaves alone. Of a block's weights
# on its own tokens, a lower triangle, a quarter is skipped: the upper half of its rows on the last half of its columns.
# Where that would mean adding to a product it is done for wide dtypes only: a bfloat16 sum would be rounded twice, and slow.


def _average(weight: Tensor, gate: Tensor, out: Tensor) -> None:
    """out = weight gate; [heads, rows, sources], [sources, heads, E], [rows, heads, E]."""
    half = weight.shape[1] // 2 if weight.dtype.itemsize >= 4 else 0
    cut = weight.shape[2] - (weight.shape[1] - half) if half else weight.shape[2]
    for w, g, y in zip(weight[:, :, :cut].unbind(0), gate[:cut].unbind(1), out.unbind(1), strict=True):
        torch.mm(w, g, out=y)
    if half:
        rest = weight[:, half:, cut:].unbind(0), gate[cut:].unbind(1), out[half:].unbind(1)
        for w, g, y in zip(*rest, strict=True):
            y.addmm_(w, g)


def _grad_weights(grad: Tensor, gate: Tensor, out: Tensor) -> None:
    """out = grad gate^T, zero in the skipped quarter; [rows, heads, E], [sources, heads, E], [heads, rows, sources]."""
    half = out.shape[1] // 2
    cut = out.shape[2] - (out.shape[1] - half)
    out[:, :half, cut:] = 0
    for dy, g, dp in zip(grad.unbind(1), gate[:cut].unbind(1), out[:, :, :cut].unbind(0), strict=True):
        torch.mm(dy, g.t(), out=dp)
    rest = grad[half:].unbind(1), gate[cut:].unbind(1), out[:, half:, cut:].unbind(0)
    for dy, g, dp in zip(*rest, strict=True):
        torch.mm(dy, g.t(), out=dp)


def _grad_gate(weight: Tensor, grad: Tensor, out: Tensor) -> None:
    """out = weight^T grad, for a block of sources and all destinations from its first on.

    [heads, rows, sources], [rows, heads, E], [sources, heads, E].
    """
    half = weight.shape[2] // 2 if weight.dtype.itemsize >= 4 else 0
    for w, dy, dg in zip(weight[:, half:].unbind(0), grad[half:].unbind(1), out.unbind(1), strict=True):
        torch.mm(w.t(), dy, out=dg)
    if half:
        _add_grad_gate(weight[:, :half, :half], grad[:half], out[:half])


def _add_grad_gate(weight: Tensor, grad: Tensor, out: Tensor) -> None:
    """out += weight^T grad; shapes as in `_grad_gate`."""
    for w, dy, dg in zip(weight.unbind(0), grad.unbind(1), out.unbind(1), strict=True):
        dg.addmm_(w.t(), dy)

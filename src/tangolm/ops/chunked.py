"""The gate averaging by blocks of destinations, with a hand-written backward that recomputes the weights.

A tile holds the finished weights of a block of destinations on all their sources, [heads, rows, sources]. Tiles fit the
cache and nothing of size T x S is kept: forward and backward each form them from queries and keys, which is cheap because
a key is far narrower than a gate. The large products run head by head on views of the gates, without a copy.

    s  = tau q k^T    P = softmax(s)    y = P g                           (P rounded once to the dtype of g)
    dP = dy g^T       ds = P * (dP - rowsum(P * dP))                       (tile by tile)
    dq = tau ds k     dk = tau ds^T q   dtau = sum(ds * q k^T)    dg = P^T dy

Sources after a tile's last destination are skipped, and a quarter of its diagonal square where that costs no rounding. On a
CPU, documents that ended before the tile are skipped too. Departs from the paper in nothing.
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
) -> Float[Tensor, "B T H E"]:
    """Average the gates for the last T of S sources; arguments as in `tangolm.ops.aggregate_gates`, state already joined."""
    if query.shape[1] == 1:
        # One destination (a step of generation) leaves nothing to skip: the equation itself is the fastest form.
        return reference.aggregate_gates(query, key, gate, temperature, document_ids, mask)
    return torch.ops.tangolm.aggregate_gates(query, key, gate, temperature, document_ids, mask)


def forward(
    query: Tensor, key: Tensor, gate: Tensor, temperature: Tensor, document_ids: Tensor | None, mask: Tensor | None
) -> Tensor:
    """What the operator `tangolm::aggregate_gates` does; compilers see it whole, with its shapes and derivative."""
    with torch.autocast(query.device.type, enabled=False):
        tiles = Tiles(query, key, temperature, document_ids, mask)
        out = gate.new_empty((*query.shape[:3], gate.shape[3]))
        outs, gates = _per_head(out), _per_head(gate)
        for heads in tiles.groups():
            for top, bottom in tiles.rows():
                first, weights = tiles.weights(heads, top, bottom)
                last = first + weights.shape[2]
                weights = weights.to(gate.dtype)
                for head, weight in zip(range(*heads), weights.unbind(0), strict=True):
                    start = tiles.first(head, top)
                    _average(weight[:, start - first :], gates[head][start:last], outs[head][top:bottom])
        return out


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    gate: Tensor,
    temperature: Tensor,
    document_ids: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `tangolm::aggregate_gates_backward` does: the gradients of query, key, gate and temperature."""
    with torch.autocast(query.device.type, enabled=False):
        tiles = Tiles(query, key, temperature, document_ids, mask)
        past, strip_rows = tiles.past, tiles.strip_rows
        grad_query = torch.empty_like(tiles.query)  # [B * H, T, D], of the scaled queries
        grad_key = torch.zeros_like(tiles.key).transpose(1, 2).contiguous()  # [B * H, D, S], the faster way round
        grad_gate = torch.empty_like(gate, memory_format=torch.contiguous_format)
        grad_gate[:, :past] = 0
        grads, gates, grad_gates = _per_head(grad), _per_head(gate), _per_head(grad_gate)
        products = gate.new_empty(tiles.size)
        kept_rows = gate.new_empty(tiles.group * min(strip_rows, tiles.queries) * tiles.sources)
        for low, high in tiles.groups():
            heads = range(low, high)
            for above in range(0, tiles.queries, strip_rows):
                below = min(above + strip_rows, tiles.queries)
                kept = tiles.tile(kept_rows, (high - low, below - above, past + below))
                if tiles.skips:
                    kept.zero_()
                for top, bottom in tiles.rows(above, below):
                    first, weights = tiles.weights((low, high), top, bottom)
                    last = first + weights.shape[2]
                    kept[:, top - above : bottom - above, first:last] = weights
                    grad_weights = tiles.tile(products, weights.shape)
                    for head, grad_weight in zip(heads, grad_weights.unbind(0), strict=True):
                        start = tiles.first(head, top)
                        grad_weight[:, : start - first] = 0
                        _grad_weights(grads[head][top:bottom], gates[head][start:last], grad_weight[:, start - first :])
                    scores = tiles.softmax_backward(grad_weights, weights)
                    torch.bmm(scores, tiles.key[low:high, first:last], out=grad_query[low:high, top:bottom])
                    grad_key[low:high, :, first:last].baddbmm_(
                        tiles.query[low:high, top:bottom].transpose(1, 2), scores
                    )
                for head, weight in zip(heads, kept.unbind(0), strict=True):
                    start, middle = tiles.first(head, above), past + above
                    if middle > start:  # sources before this strip, which saw earlier strips (or none in training) too
                        grad_gates[head][start:middle].addmm_(weight[:, start:middle].t(), grads[head][above:below])
                    for top, bottom in tiles.rows(above, below):
                        end = tiles.end(head, bottom, below)
                        _grad_gate(
                            weight[top - above : end - above, past + top : past + bottom],
                            grads[head][top:end],
                            grad_gates[head][past + top : past + bottom],
                        )
        scaled = grad_query.view(tiles.batch, tiles.heads, tiles.queries, -1).transpose(1, 2)
        grad_temperature = (scaled * query).sum((0, 1, 3)).to(temperature.dtype)
        scaled = (scaled * temperature.to(scaled.dtype)[:, None]).to(query.dtype).contiguous()
        back = grad_key.view(tiles.batch, tiles.heads, -1, tiles.sources).permute(0, 3, 1, 2)
        return scaled, back.to(key.dtype).contiguous(), grad_gate, grad_temperature


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, grad):
    return *torch.ops.tangolm.aggregate_gates_backward(grad, *ctx.saved_tensors), None, None


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


def _per_head(tensor: Tensor) -> list[Tensor]:
    """[B, S, H, E] as B * H views [S, E] with unit stride along E (an expanded or transposed tensor is copied)."""
    if tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    return [head for row in tensor.unbind(0) for head in row.unbind(1)]


# The products of one head. The last columns of a tile's weights (or the first columns of kept ones) are a lower triangle:
# the upper half of its rows is zero in the last half of its columns. Skipping that quarter pays for float32. Adding to a
# bfloat16 product would round twice and runs slowly, so there only the product that writes its parts apart is split.


def _average(weight: Tensor, gate: Tensor, out: Tensor) -> None:
    """out = weight gate, for weights [rows, sources]."""
    half = weight.shape[0] // 2
    if half == 0 or weight.dtype.itemsize < 4:
        torch.mm(weight, gate, out=out)
        return
    cut = weight.shape[1] - (weight.shape[0] - half)
    torch.mm(weight[:, :cut], gate[:cut], out=out)
    out[half:].addmm_(weight[half:, cut:], gate[cut:])


def _grad_weights(grad: Tensor, gate: Tensor, out: Tensor) -> None:
    """out = grad gate^T, [rows, sources]; zero where half the rows see no source."""
    half = out.shape[0] // 2
    cut = out.shape[1] - (out.shape[0] - half)
    torch.mm(grad, gate[:cut].t(), out=out[:, :cut])
    out[:half, cut:] = 0
    torch.mm(grad[half:], gate[cut:].t(), out=out[half:, cut:])


def _grad_gate(weight: Tensor, grad: Tensor, out: Tensor) -> None:
    """out = weight^T grad, for weights [rows, sources] of a block of sources and all destinations from its first on."""
    half = weight.shape[1] // 2
    if half == 0 or weight.dtype.itemsize < 4:
        torch.mm(weight.t(), grad, out=out)
        return
    torch.mm(weight[half:].t(), grad[half:], out=out)
    out[:half].addmm_(weight[:half, :half].t(), grad[:half])

"""The gate averaging by blocks of destinations, with a hand-written backward that recomputes the weights.

A tile holds the finished weights of a block of destinations on all their sources, [lanes, rows, sources]. Tiles fit the
cache and nothing of size T x S is kept: forward and backward each form them from queries and keys, which is cheap because
a key is far narrower than a gate. The large products are batches of a group's lanes (heads of batch rows), on gates laid out
head by head.

    s  = tau q k^T    P = softmax(s)    y = P g                           (P rounded once to the dtype of g)
    dP = dy g^T       ds = P * (dP - rowsum(P * dP))                       (tile by tile)
    dq = tau ds k     dk = tau ds^T q   dtau = sum(ds * q k^T)    dg = P^T dy

Sources after a tile's last destination are skipped; on a CPU, documents that ended before the tile are too. With `silu` the
operand is a and g = SiLU(a), which is formed for one group of heads at a time in both directions; only a is kept. Departs
from the paper in nothing.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tangolm.ops import reference
from tangolm.ops.operators import register
from tangolm.ops.tiles import Tiles, of_lanes, tile

LINE = 64  # bytes of a cache line, to which torch aligns what it allocates


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
    tiles = Tiles(query, key, temperature, gate.shape[3], document_ids, mask)
    width = gate.shape[3]
    gates, averages = (_padded_room(gate, tiles.group, length) for length in (tiles.sources, tiles.block))
    out = gate.new_empty((*query.shape[:3], width))
    for lanes in tiles.groups():
        result = of_lanes(out, lanes)
        own = _head_major(of_lanes(gate, lanes), gates, silu)
        for top, bottom in tiles.blocks():
            first, weights = tiles.weights(lanes, top, bottom)
            average = averages[: len(own), : bottom - top]
            torch.bmm(weights.to(gate.dtype), own[:, first : first + weights.shape[2]], out=average)
            rows = result[:, :, top:bottom]
            rows.copy_(average[..., :width].unflatten(0, rows.shape[:2]))
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
    tiles = Tiles(query, key, temperature, gate.shape[3], document_ids, mask)
    past, width, one_strip = tiles.past, gate.shape[3], tiles.strip_rows >= tiles.queries
    grad_query = torch.empty_like(tiles.query)  # [B * H, T, D], of the scaled queries
    grad_key = torch.zeros_like(tiles.key).transpose(1, 2).contiguous()  # [B * H, D, S], the faster way round
    grad_gate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    grad_gate[:, :past] = 0
    gates, grads, sums = (
        _padded_room(gate, tiles.group, length) for length in (tiles.sources, tiles.queries, tiles.block)
    )
    products = gate.new_empty(tiles.group * tiles.block * tiles.sources)
    kept_weights = gate.new_empty(tiles.group * min(tiles.strip_rows, tiles.queries) * tiles.sources)
    for lanes in tiles.groups():
        emitted, result = of_lanes(gate, lanes), of_lanes(grad_gate, lanes)
        own = _head_major(emitted, gates, silu)
        dy = _head_major(of_lanes(grad, lanes), grads)
        for above in range(0, tiles.queries, tiles.strip_rows):
            below = min(above + tiles.strip_rows, tiles.queries)
            kept = tile(kept_weights, (len(dy), below - above, past + below))
            if tiles.skips:
                kept.zero_()
            for top, bottom in tiles.blocks(above, below):
                first, weights = tiles.weights(lanes, top, bottom)
                last = first + weights.shape[2]
                kept[:, top - above : bottom - above, first:last] = weights
                grad_weights = tile(products, weights.shape)
                torch.bmm(dy[:, top:bottom], own[:, first:last].mT, out=grad_weights)
                scores = tiles.softmax_backward(grad_weights, weights)
                torch.bmm(scores, tiles.key[lanes, first:last], out=grad_query[lanes, top:bottom])
                grad_key[lanes, :, first:last].baddbmm_(tiles.query[lanes, top:bottom].transpose(1, 2), scores)
            for start, end, top, bottom in tiles.source_blocks(lanes, above, below):
                grad_own = sums[: len(dy), : end - start]
                torch.bmm(kept[:, top - above : bottom - above, start:end].mT, dy[:, top:bottom], out=grad_own)
                part = result[:, :, start:end]
                grad_own = grad_own[..., :width].unflatten(0, part.shape[:2])
                if start < past + above:  # seen before this strip: earlier ones have left their sums, or zeros
                    grad_own.add_(part)
                if silu and one_strip:
                    torch.ops.aten.silu_backward(grad_own, emitted[:, :, start:end], grad_input=part)
                else:
                    part.copy_(grad_own)
        if silu and not one_strip:
            torch.ops.aten.silu_backward(result, emitted, grad_input=result)
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


def _padded_room(gate: Tensor, lanes: int, length: int) -> Tensor:
    """Room for so many rows of gates, [lanes, length, padded E], zeros behind each row's end.

    Every row begins with a cache line: products on such rows are up to a third faster.
    """
    width, entries = gate.shape[3], LINE // gate.dtype.itemsize
    room = gate.new_empty((lanes, length, -(-width // entries) * entries))
    room[..., width:] = 0
    return room


def _head_major(part: Tensor, room: Tensor, silu: bool = False) -> Tensor:
    """A group's part [rows, heads, T, E], or its SiLU, as a batch [heads of all rows, T, padded E].

    It is laid out in the room, but for a part of one row that the products take as it is: not in half precision, where heads
    that stand apart take twice as long.
    """
    batch, heads, _, width = part.shape
    if batch == 1 and not silu and part.dtype.itemsize >= 4 and part.stride(-1) == 1 and width == room.shape[2]:
        return part[0]
    result = room[: batch * heads]
    own = result[..., :width].unflatten(0, (batch, heads))
    if silu:
        torch.ops.aten.silu(part, out=own)
    else:
        own.copy_(part)
    return result

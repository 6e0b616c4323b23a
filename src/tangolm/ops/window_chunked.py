"""The windowed gate averaging block by block, with a hand-written backward that recomputes weights and sums.

Nothing larger than a gate matrix is kept: weights are formed for some blocks at a time, the sums S of one head at a time, by
a scan over blocks, forwards to read them and backwards for their gradients. With P the weights of a block's destinations on
the sources of two blocks, A those on the sums, B the far features of a block's keys, all of `window_tiles`:

    y = P g + A S          S <- c * S + B^T g                  (c rescales the sums where their offset rises)
    dP = dy g^T            dA = dy S^T                         delta = rowsum(P * dP) + rowsum(A * dA)
    ds = P * (dP - delta)  dlog A = A * (dA - delta Z)         (near pairs; far pairs go through A and B in the same way)
    dS <- c * dS + A^T dy  dZ <- c * dZ - A^T delta
    dg = P^T dy + B dS     dlog B = B * (g dS^T + dZ)

Sums and products are formed in at least float32, whatever the dtype of the gates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tangolm.ops.operators import register
from tangolm.ops.tiles import of_lanes, tile
from tangolm.ops.window_sums import Sums
from tangolm.ops.window_tiles import WindowTiles


def aggregate_gates(
    query: Float[Tensor, "B T H D"],
    key: Float[Tensor, "B T H D"],
    gate: Float[Tensor, "B T H E"],
    temperature: Float[Tensor, " H"],
    features: Float[Tensor, "H M D"] | None,
    window: int,
    document_ids: Int[Tensor, "B T"] | None,
    sums: Sums | None = None,
) -> tuple[Float[Tensor, "B T H E"], Sums | None]:
    """The averages; arguments and results as those of `window.reference`, but that sums are returned where given only."""
    if sums is None:
        average = torch.ops.tangolm.aggregate_gates_windowed
        return average(query, key, gate, temperature, features, document_ids, window), None
    with torch.autocast(query.device.type, enabled=False):
        tiles = WindowTiles(query, key, gate.shape[3], temperature, features, window, document_ids, sums)
        out, gates = _average(tiles, gate, sums)
        last = max(tiles.count - 2, 0)
        offset, total = (x[:, last].view(sums.offset.shape) for x in (tiles.offset, tiles.total))
        document = sums.document if document_ids is None else tiles.document[:, last]
        return out, Sums(offset, total, gates, document)


def forward(
    query: Tensor,
    key: Tensor,
    gate: Tensor,
    temperature: Tensor,
    features: Tensor | None,
    document_ids: Tensor | None,
    window: int,
) -> Tensor:
    """What the operator `tangolm::aggregate_gates_windowed` does; compilers see it whole, with its shapes and derivative."""
    with torch.autocast(query.device.type, enabled=False):
        tiles = WindowTiles(query, key, gate.shape[3], temperature, features, window, document_ids)
        return _average(tiles, gate, None)[0]


def _average(tiles: WindowTiles, gate: Tensor, sums: Sums | None) -> tuple[Tensor, Tensor]:
    """The averages, and the gates' sums over all blocks but the last two (empty without features)."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    gate = _unit_stride(gate)
    out = gate.new_empty(gate.shape)
    kept = []
    for lanes in tiles.groups():
        gates, result = _lanes(gate, lanes), of_lanes(out, lanes)
        state, room = _start(tiles, lanes, gates, wide, sums), _room(tiles, gates, wide)
        for blocks in tiles.segments(lanes):
            weights = tiles.weights(lanes, blocks)
            for b in blocks:
                start, first, end = tiles.rows(b)
                y = tile(room, (len(gates), end - first, gates.shape[2]))
                here = slice(tiles.window if b == 0 else 0, tiles.window + end - first)
                pairs = weights.pairs[:, b - blocks.start, : end - first, here].to(wide)
                torch.bmm(pairs, gates[:, start:end].to(wide), out=y)
                if weights.sums is not None and tiles.reads_sums(b):
                    y.baddbmm_(weights.sums[:, b - blocks.start, : end - first].to(wide), state)
                rows = result[:, :, first:end]
                rows.copy_(y.view(rows.shape))
                _absorb(tiles, lanes, b, gates, state)
        kept.append(state)
    return out, torch.cat(kept).view(tiles.batch, tiles.heads, *kept[0].shape[1:])


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    gate: Tensor,
    temperature: Tensor,
    features: Tensor | None,
    document_ids: Tensor | None,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `tangolm::aggregate_gates_windowed_backward` does: the gradients of query, key, gate and temperature."""
    with torch.autocast(query.device.type, enabled=False):
        tiles = WindowTiles(query, key, gate.shape[3], temperature, features, window, document_ids)
        gate, grad = _unit_stride(gate), _unit_stride(grad)
        grad_gate = torch.empty_like(gate, memory_format=torch.contiguous_format)
        slopes = _Slopes(tiles)
        for lanes in tiles.groups():
            gates, grads = _lanes(gate, lanes), _lanes(grad, lanes)
            kept = _destinations(tiles, slopes, lanes, gates, grads)
            _sources(tiles, slopes, lanes, gates, grads, of_lanes(grad_gate, lanes), kept)
        grad_query, grad_key, grad_temperature = slopes.finish(query, key)
        return grad_query, grad_key, grad_gate, grad_temperature.to(temperature.dtype)


class _Slopes:
    """Gradients of scaled queries, keys and the logarithms of features, summed in the layout of the tiles."""

    def __init__(self, tiles: WindowTiles) -> None:
        self.tiles = tiles
        self.query, self.key = torch.empty_like(tiles.query), torch.zeros_like(tiles.key)
        if tiles.features is not None:
            self.query_features = tiles.query.new_empty((*tiles.query.shape[:3], 2 * tiles.features.shape[1]))
            self.far_keys = torch.zeros_like(tiles.far_keys)

    def finish(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and temperature."""
        tiles, tau = self.tiles, self.tiles.tau
        scaled = tiles.unblocked(self.query)
        grad_temperature = (scaled * query).sum((0, 1, 3))
        grad_query = scaled * tau[:, None]
        grad_key = tiles.unblocked(self.key[:, 1:])
        if tiles.features is not None:
            directions, root = tiles.features.to(tau.dtype), tau.sqrt()
            log_scale = self.query_features.view(tiles.batch, tiles.heads, -1).sum((0, 2))
            by_query = _one_way(self.query_features)
            by_key = _one_way(self.far_keys[:, 1:])  # of all blocks but the last
            used = (by_query * tiles.projected_query).flatten(1).sum(1) + (
                by_key * tiles.projected_key[:, 1:-1]
            ).flatten(1).sum(1)
            # The projections hold sqrt(tau), log_scale holds -tau.
            grad_temperature = grad_temperature + used.view(tiles.batch, -1).sum(0) / (2 * tau) - log_scale
            by_query, by_key = tiles.unblocked(by_query), tiles.unblocked(by_key)
            grad_query = grad_query + torch.einsum("bthm,hmd,h->bthd", by_query, directions, root)
            back = torch.einsum("bthm,hmd,h->bthd", by_key, directions, root)
            grad_key = torch.cat([grad_key[:, : back.shape[1]] + back, grad_key[:, back.shape[1] :]], 1)
        return (
            grad_query.to(query.dtype).contiguous(),
            grad_key.to(key.dtype).contiguous(),
            grad_temperature,
        )


class _Kept(NamedTuple):
    """What the walk over destinations keeps of some lanes for the walk over sources.

    Weights [g, blocks, 2W, W] of a block's own destinations and the next block's on its sources; weights on the sums
    [g, blocks, W, m]; A^T delta [g, blocks, m].
    """

    pairs: Tensor
    sums: Tensor
    totals: Tensor


def _destinations(tiles: WindowTiles, slopes: _Slopes, lanes: slice, gates: Tensor, grads: Tensor) -> _Kept:
    """Walk over blocks of destinations, forwards: gradients of queries, of keys of two blocks, of features of queries."""
    wide = torch.promote_types(gates.dtype, torch.float32)
    size, w, dtype = len(gates), tiles.window, tiles.dtype
    m = 0 if tiles.features is None else 2 * tiles.features.shape[1]
    kept = _Kept(
        gates.new_zeros((size, tiles.count, 2 * w, w), dtype=wide),
        gates.new_empty((size, tiles.count, w, m), dtype=wide),
        gates.new_empty((size, tiles.count, m), dtype=dtype),
    )
    state = _start(tiles, lanes, gates, wide, None)
    for blocks in tiles.segments(lanes):
        some = slice(blocks.start, blocks.stop)
        weights = tiles.weights(lanes, blocks)
        grad_pairs = gates.new_zeros((size, len(blocks), w, 2 * w), dtype=wide)
        grad_sums = gates.new_zeros((size, len(blocks), w, m), dtype=wide)
        for b in blocks:
            start, first, end = tiles.rows(b)
            place = (slice(None), b - blocks.start, slice(end - first))
            dy = grads[:, first:end].to(wide)
            here = slice(w if b == 0 else 0, w + end - first)
            torch.bmm(dy, gates[:, start:end].to(wide).transpose(1, 2), out=grad_pairs[(*place, here)])
            if tiles.reads_sums(b):
                torch.bmm(dy, state.transpose(1, 2), out=grad_sums[place])
            _absorb(tiles, lanes, b, gates, state)
        pairs, grad_pairs, grad_sums = weights.pairs, grad_pairs.to(dtype), grad_sums.to(dtype)
        kept.pairs[:, some, :w] = pairs[..., w:]
        skip = 1 if blocks.start == 0 else 0
        kept.pairs[:, blocks.start + skip - 1 : blocks.stop - 1, w:] = pairs[:, skip:, :, :w]
        delta = (pairs * grad_pairs).sum(-1, keepdim=True)
        if weights.sums is not None:
            delta += (weights.sums * grad_sums).sum(-1, keepdim=True)
        grad_pairs -= delta
        if weights.sums is not None and weights.near_features is not None:
            far = grad_pairs[..., :w] * tiles.lower
            grad_sums -= delta * tiles.read_entry(tiles.total, lanes, blocks)[:, :, None]
            slope = weights.near_features * (far @ tiles.far_keys[lanes, some]) + weights.sums * grad_sums
            slopes.query_features[lanes, some] = slope
            slopes.far_keys[lanes, some] = tiles.far_keys[lanes, some] * (far.transpose(-1, -2) @ weights.near_features)
            kept.sums[:, some] = weights.sums
            kept.totals[:, some] = (weights.sums * delta).sum(2)
        scores = grad_pairs.mul_(pairs)
        if weights.sums is not None:
            scores[..., :w].masked_fill_(tiles.lower, 0.0)  # far pairs have gone by their features
        slopes.query[lanes, some] = scores @ tiles.windows(lanes, blocks)
        both = scores.transpose(-1, -2) @ tiles.query[lanes, some]
        slopes.key[lanes, some] += both[:, :, :w]
        slopes.key[lanes, blocks.start + 1 : blocks.stop + 1] += both[:, :, w:]
    return kept


def _sources(
    tiles: WindowTiles, slopes: _Slopes, lanes: slice, gates: Tensor, grads: Tensor, result: Tensor, kept: _Kept
) -> None:
    """Walk over blocks of sources, backwards: gradients of gates, and of features of keys through the sums."""
    wide = kept.pairs.dtype
    state = kept.sums.new_zeros((len(gates), kept.sums.shape[3], gates.shape[2]))  # dS
    totals = kept.totals.new_zeros((len(gates), kept.sums.shape[3]))  # dZ
    room = _room(tiles, gates, wide)
    for b in reversed(range(tiles.count)):
        _, first, end = tiles.rows(b)
        after = min(end + tiles.window, tiles.tokens)
        out = tile(room, (len(gates), end - first, gates.shape[2]))
        pairs = kept.pairs[:, b, : after - first, : end - first]
        torch.bmm(pairs.transpose(1, 2), grads[:, first:after].to(wide), out=out)
        if tiles.features is not None and b + 2 < tiles.count:
            _, low, high = tiles.rows(b + 2)
            if tiles.moved(lanes, b + 2):
                state *= tiles.scale[lanes, b + 2, :, None].to(wide)
            state.baddbmm_(kept.sums[:, b + 2, : high - low].transpose(1, 2), grads[:, low:high].to(wide))
            totals = totals * tiles.scale[lanes, b + 2] - kept.totals[:, b + 2]
            far = tiles.far_keys[lanes, b + 1]
            out.baddbmm_(far.to(wide), state)
            slope = torch.bmm(gates[:, first:end].to(wide), state.transpose(1, 2)).to(far.dtype)
            slopes.far_keys[lanes, b + 1] += far * (slope + totals[:, None])
        own = result[:, :, first:end]
        own.copy_(out.view(own.shape))


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.window = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, grad):
    backward = torch.ops.tangolm.aggregate_gates_windowed_backward
    return *backward(grad, *ctx.saved_tensors, ctx.window), None, None, None


def _differentiate_again(ctx, *grads):
    raise NotImplementedError("impl 'chunked' has no second derivative; impl='reference' has")


register(
    "tangolm::aggregate_gates_windowed",
    forward,
    lambda query, key, gate, *_: gate.new_empty(gate.shape),
    _differentiate,
    _save,
)
register(
    "tangolm::aggregate_gates_windowed_backward",
    backward,
    lambda _, *inputs: tuple(tensor.new_empty(tensor.shape) for tensor in inputs[:4]),
    _differentiate_again,
)


@register_flop_formula(torch.ops.tangolm.aggregate_gates_windowed)
def _forward_flops(query, key, gate, temperature, features, document_ids, window, *_, **__) -> int:
    """What the reference counts: two blocks for each destination, and reading and adding to the sums."""
    batch, tokens, heads, width = query
    far = 0 if features is None else 2 * 2 * features[1] * gate[3]
    return 2 * batch * heads * tokens * (2 * window * (width + gate[3]) + far)


@register_flop_formula(torch.ops.tangolm.aggregate_gates_windowed_backward)
def _backward_flops(_, *shapes, **__) -> int:
    """Two products for each of the forward's; recomputed weights and sums are not counted."""
    return 2 * _forward_flops(*shapes)


def _start(tiles: WindowTiles, lanes: slice, gates: Tensor, wide: torch.dtype, sums: Sums | None) -> Tensor:
    """The sums S [g, m, E] before the first block; of no feature where there are none."""
    if sums is not None:
        return sums.gates.flatten(0, 1)[lanes].to(wide, copy=True)
    m = 0 if tiles.features is None else 2 * tiles.features.shape[1]
    return gates.new_zeros((len(gates), m, gates.shape[2]), dtype=wide)


def _absorb(tiles: WindowTiles, lanes: slice, b: int, gates: Tensor, state: Tensor) -> None:
    """Behind the destinations of block b: add block b - 1 to the sums, where a later block reads them."""
    if tiles.features is None or b == 0 or b + 1 == tiles.count:
        return
    if tiles.moved(lanes, b):
        state *= tiles.scale[lanes, b, :, None].to(state.dtype)
    sources = gates[:, (b - 1) * tiles.window : b * tiles.window].to(state.dtype)
    state.baddbmm_(tiles.far_keys[lanes, b].transpose(1, 2).to(state.dtype), sources)


def _lanes(x: Tensor, lanes: slice) -> Tensor:
    """Some lanes of [B, T, H, E] as [g, T, E]: a view where they are of one batch row."""
    return of_lanes(x, lanes).flatten(0, 1)


def _room(tiles: WindowTiles, gates: Tensor, wide: torch.dtype) -> Tensor:
    """Room for a block's products: contiguous, so that they are shared out by head, and wide."""
    return gates.new_empty(len(gates) * tiles.window * gates.shape[2], dtype=wide)


def _one_way(x: Tensor) -> Tensor:
    """From gradients of `both_ways` to those of the projections."""
    forth, back = x.chunk(2, -1)
    return forth - back


def _unit_stride(x: Tensor) -> Tensor:
    """The tensor itself where the products can take it as it is, else a copy (expanded or transposed)."""
    return x if x.stride(-1) == 1 and 0 not in x.stride() else x.contiguous()

"""Finished weights of the gate averaging, tile by tile: how a T x S triangle is cut, and the softmax of one cut.

Destinations come in blocks of rows, lanes in groups small enough that a tile [lanes, rows, sources] stays in the cache. A lane
is a head of a batch row: batch * H + head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tangolm.ops import reference

# Weights in a tile that holds several heads: 4 MB in float32. Larger ones leave the caches before they are multiplied.
TILE = 1 << 20
# Gates of a group of heads: 2 MB in float32, for the same reason, but a head a thread at least.
GATES = 1 << 19
# Destinations whose weights the backward keeps at once, for one group of heads: a source's gradient is then the sum of few
# products. Longer sequences keep an eighth, so that a bfloat16 sum is rounded eight times at most.
STRIP = 2048
# Destinations in a tile, ascending, each a multiple of the first, and how fast products of so many rows are. Few rows waste
# less of the diagonal square, whose upper half counts for nothing, and less on documents that end within them.
BLOCKS = {64: 0.82, 128: 1.0}


def tile(buffer: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """The start of a flat buffer as a contiguous tensor of that shape."""
    return buffer[: math.prod(shape)].view(shape)


def rows_of(lanes: slice, heads: int) -> slice:
    """The batch rows of some lanes."""
    return slice(lanes.start // heads, (lanes.stop - 1) // heads + 1)


def of_lanes(tensor: Tensor, lanes: slice) -> Tensor:
    """A view of some lanes of [B, T, H, E], heads of one batch row or whole rows, as [rows, heads of each, T, E]."""
    heads = tensor.shape[2]
    return tensor[rows_of(lanes, heads), :, lanes.start % heads : (lanes.stop - 1) % heads + 1].transpose(1, 2)


def runs(lanes: int, span: int, size: int) -> Iterator[slice]:
    """Cut so many lanes into spans, and these into runs of at most `size`."""
    for first in range(0, lanes, span):
        end = min(first + span, lanes)
        yield from (slice(low, min(low + size, end)) for low in range(first, end, size))


class Tiles:
    """The operands of one call, laid out for tiles: scaled queries and keys, head-major, in the dtype of the scores."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        temperature: Tensor,
        gate_width: int,
        document_ids: Tensor | None,
        mask: Tensor | None,
    ) -> None:
        self.batch, self.queries, self.heads, width = query.shape
        self.sources = key.shape[1]
        self.past = self.sources - self.queries  # sources before the first destination
        first = _first_sources(document_ids, self.past)
        block = _cheapest_block(first, self.queries, self.sources)
        # By batch row and block; empty where every tile begins with the first source.
        self._first = [] if first is None else first[:, :: block // min(BLOCKS)].tolist()
        self.block = min(block, self.queries)
        self.strip_rows = max(STRIP, -(-self.queries // 8)) // self.block * self.block
        fit = max(1, TILE // (self.block * self.sources))
        near = GATES // max(1, self.sources * gate_width)
        # A group is a part of one batch row; or whole rows, where they are short and all their tiles begin with the first source.
        rows = 1 if self._first else min(fit, near) // self.heads
        self.group = min(rows, self.batch) * self.heads
        if rows <= 1:
            self.group = min(fit, max(torch.get_num_threads(), near), self.heads)
        dtype = torch.promote_types(query.dtype, torch.float32)
        scaled = query.to(dtype) * temperature.to(dtype)[:, None]
        self.query = scaled.transpose(1, 2).reshape(-1, self.queries, width)  # [B * H, T, D]
        self.key = key.to(dtype).transpose(1, 2).reshape(-1, self.sources, width)  # [B * H, S, D]
        self._document_ids, self._mask = document_ids, mask
        self._never = torch.finfo(dtype).min  # finite: a row without any source must not give 0/0
        self._later = self.query.new_full((self.block, self.block), self._never).triu_(1)  # added to a block's square
        size = self.group * self.block * self.sources
        self._scores, self._weights = self.query.new_empty(size), self.query.new_empty(size)

    @property
    def skips(self) -> bool:
        """Whether tiles may begin after the first source."""
        return bool(self._first)

    def groups(self) -> Iterator[slice]:
        """Lanes whose tiles are formed together: heads of one batch row, or whole rows."""
        return runs(self.batch * self.heads, max(self.group, self.heads), self.group)

    def blocks(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, int]]:
        """Blocks of destinations."""
        last = self.queries if last is None else last
        return ((top, min(top + self.block, last)) for top in range(first, last, self.block))

    def first(self, lanes: slice, top: int) -> int:
        """The first source that a group's block of destinations from `top` on can see."""
        return self._first[lanes.start // self.heads][top // self.block] if self._first else 0

    def source_blocks(self, lanes: slice, above: int, below: int) -> Iterator[tuple[int, int, int, int]]:
        """Blocks of sources that destinations from `above` to `below` see, each with the destinations that may see it."""
        before = self.past + above
        for start in range(self.first(lanes, above), before, self.block):
            yield start, min(start + self.block, before), above, below
        for top, bottom in self.blocks(above, below):
            end = bottom if self._first else below
            while end < below and self.first(lanes, end) < self.past + bottom:
                end = min(end + self.block, below)
            yield self.past + top, self.past + bottom, top, end

    def weights(self, lanes: slice, top: int, bottom: int) -> tuple[int, Tensor]:
        """The first source of a tile, and its weights [lanes, rows, sources up to the last destination].

        They stay valid until the next call.
        """
        rows = rows_of(lanes, self.heads)
        first, last = self.first(lanes, top), self.past + bottom
        shape = (lanes.stop - lanes.start, bottom - top, last - first)
        scores, weights = tile(self._scores, shape), tile(self._weights, shape)
        torch.bmm(self.query[lanes, top:bottom], self.key[lanes, first:last].transpose(1, 2), out=scores)
        if self._document_ids is None and self._mask is None:
            scores[:, :, -shape[1] :].add_(self._later[: shape[1], : shape[1]])
            return first, torch.softmax(scores, -1, out=weights)
        ids = None if self._document_ids is None else self._document_ids[rows, first:last]
        mask = None if self._mask is None else self._mask[rows, first:last]
        hidden = ~reference.visible(shape[1], shape[2], ids, mask, scores.device)
        by_row = (rows.stop - rows.start, -1, *shape[1:])
        scores.view(by_row).masked_fill_(hidden[:, None], self._never)
        torch.softmax(scores, -1, out=weights)
        if mask is not None:
            weights.view(by_row).masked_fill_(~mask[:, None, -shape[1] :, None], 0.0)
        return first, weights

    def softmax_backward(self, grad: Tensor, weights: Tensor) -> Tensor:
        """The gradient of the scores, weights * (grad - rowsum(weights * grad)); valid until the next tile."""
        out = tile(self._scores, weights.shape)
        grad = grad.to(weights.dtype)
        return torch.ops.aten._softmax_backward_data.out(grad, weights, -1, weights.dtype, grad_input=out)


def _first_sources(document_ids: Tensor | None, past: int) -> Tensor | None:
    """The first source that each of the smallest blocks sees, [B, blocks]; None where that is not known to be any but 0."""
    if document_ids is None or document_ids.device.type != "cpu":
        return None  # reading ids back from an accelerator would wait for it
    ids = document_ids.contiguous()
    first = torch.searchsorted(ids, ids[:, past :: min(BLOCKS)].contiguous())
    return first if bool(first.any()) else None


def _cheapest_block(first: Tensor | None, queries: int, sources: int) -> int:
    """The rows of a block, of `BLOCKS`, with which the products should take the least time."""
    smallest = min(BLOCKS)
    if first is None:
        first = torch.zeros((1, -(-queries // smallest)), dtype=torch.long, device="cpu")
    times = {}
    for block, rate in BLOCKS.items():
        if block > smallest and block >= 2 * queries:
            break  # no more rows than half as large a block has
        tops = torch.arange(0, queries, block, device=first.device)
        rows = (queries - tops).clamp(max=block)
        seen = sources - queries + tops + rows - first[:, :: block // smallest]
        times[block] = float((rows * seen).sum()) / rate
    return min(times, key=times.__getitem__)

"""Finished weights of the windowed averaging, some blocks at a time: on the sources of two blocks, and on the sums.

A lane is a head of a batch row: batch * H + head. Block b has the queries of b and the keys of b - 1 and b;
arrays over sums have one more entry than blocks: entry b is for the sums over the blocks before b.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tangolm.ops.features import both_ways, log_scale, projections
from tangolm.ops.tiles import rows_of, runs
from tangolm.ops.window_sums import NONE, SLACK, Sums, last_document, raised

# Weights formed at once, and entries of the sums worked on at once: 512 kB in float32, half a core's second-level cache.
CACHE = 1 << 17
# Gates, or four times the sums, of a group of whole batch rows: 16 MB in float32. What counts there is fewer, larger products.
ROWS = 1 << 22


class Weights(NamedTuple):
    """Of g lanes and n blocks: on the sources of two blocks [g, n, W, 2W]; by features, normalised, relative to the offset
    behind the block before [g, n, W, m]; the same on the sums [g, n, W, m]. The latter two None without features."""

    pairs: Tensor
    near_features: Tensor | None
    sums: Tensor | None


class WindowTiles:
    """The operands of one call, laid out in blocks."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        channels: int,
        temperature: Tensor,
        features: Tensor | None,
        window: int,
        document_ids: Tensor | None,
        sums: Sums | None = None,
    ) -> None:
        self.batch, self.tokens, self.heads, self.width = query.shape
        self.window, self.channels = window, channels
        self.count = math.ceil(self.tokens / window)
        self.dtype = dtype = torch.promote_types(query.dtype, torch.float32)
        self.tau = temperature.to(dtype)
        self.lanes = self.batch * self.heads
        self.query = self._blocks(query.to(dtype) * self.tau[:, None])  # [lanes, blocks, W, D], scaled
        self.key = self._blocks(key.to(dtype), front=1)  # [lanes, 1 + blocks, W, D]
        self.ids = None
        if document_ids is not None:
            # [B, 1 + blocks, W]; what fills up is of the last document, the block in front of the first one too.
            front = document_ids[:, :1].expand(-1, window)
            behind = document_ids[:, -1:].expand(-1, self.count * window - self.tokens)
            self.ids = torch.cat([front, document_ids, behind], 1).view(self.batch, 1 + self.count, window)
        on = query.device
        self.lower = torch.ones((window, window), dtype=torch.bool, device=on).tril()
        self.seen = torch.cat([~self.lower, self.lower], 1)  # [W, 2W]: near sources of a destination
        self.features = features
        if features is not None:
            self._prepare_features(query.to(dtype), key.to(dtype), features.to(dtype), sums)

    def _prepare_features(self, query: Tensor, key: Tensor, directions: Tensor, sums: Sums | None) -> None:
        self.projected_query = self._blocks(projections(query, self.tau, directions))  # [lanes, blocks, W, M]
        self.projected_key = self._blocks(projections(key, self.tau, directions), front=1)
        self.log_scale = log_scale(self.tau, directions).repeat(self.batch)  # [lanes]
        self.starts = sums is not None  # with sums from before
        if sums is None:
            sums = Sums.empty(self.batch, self.heads, 2 * directions.shape[1], 0, self.dtype, query.device)
        log_keys = both_ways(self.projected_key[:, :-1])  # entry b: block b - 1
        own = goes_on = None
        if self.ids is not None:
            start = sums.document[:, None]
            document = torch.cat([start, last_document(self.ids[:, 1:-1, -1], start)], 1)  # [B, blocks]: of each entry
            goes_on = self._per_lane(document == torch.cat([document[:, :1], document[:, :-1]], 1))
            own = self._per_lane(self.ids[:, :-1] == document[..., None])
            self.document = document
            peaks = log_keys.masked_fill(~own[..., None], NONE).amax(2)
        else:
            peaks = log_keys.amax(2)
        # offset[b], total[b]: the sums before block b (over blocks up to b - 1); scale[b] takes those of b - 1 there.
        offsets, scales = [sums.offset.flatten(0, 1)], [torch.ones_like(peaks[:, 0])]
        for b in range(1, self.count):
            before = offsets[-1] if goes_on is None else offsets[-1].masked_fill(~goes_on[:, b, None], NONE)
            offsets.append(raised(before, peaks[:, b]))
            scale = (before - offsets[-1]).exp()
            scales.append(scale if goes_on is None else scale * goes_on[:, b, None])
        self.offset, self.scale = torch.stack(offsets, 1), torch.stack(scales, 1)  # [lanes, blocks, m]
        log_keys -= self.offset[:, :, None]
        self.far_keys = log_keys.clamp_(max=SLACK).exp_()  # [lanes, blocks, W, m]; entry b: block b - 1
        if own is not None:
            self.far_keys *= own[..., None]
        self.far_keys[:, 0] = 0
        added, totals = self.far_keys.sum(2), [sums.total.flatten(0, 1)]
        for b in range(1, self.count):
            totals.append(totals[-1] * self.scale[:, b] + added[:, b])
        self.total = torch.stack(totals, 1)
        # Rescaling sums by one is skipped where finding out does not make an accelerator wait.
        moved = (self.scale != 1).any(-1)
        self._moved = moved.tolist() if moved.device.type == "cpu" else None

    def groups(self) -> Iterator[slice]:
        """Lanes worked on together: heads of one batch row; or whole rows, where they are short and their sums small."""
        m = self.window if self.features is None else 2 * self.features.shape[1]
        span = size = self.heads
        if self.query.device.type == "cpu":
            rows = ROWS // (self.heads * self.channels * max(self.tokens, 4 * m))
            if rows > 1:
                span = size = rows * self.heads
            else:
                # A head a thread at least: a block's products are shared out by head, each with its sums in one core's cache.
                size = max(torch.get_num_threads(), CACHE // (m * self.channels))
        return runs(self.lanes, span, size)

    def segments(self, lanes: slice) -> Iterator[range]:
        """Runs of blocks whose weights are formed together."""
        size = max(1, CACHE // ((lanes.stop - lanes.start) * 2 * self.window * self.window))
        return (range(b, min(b + size, self.count)) for b in range(0, self.count, size))

    def rows(self, b: int) -> tuple[int, int, int]:
        """The first source and the first destination of block b, and the end of both."""
        return max(0, (b - 1) * self.window), b * self.window, min((b + 1) * self.window, self.tokens)

    def reads_sums(self, b: int) -> bool:
        """Whether there are sums that destinations of block b read."""
        return self.features is not None and (b > 1 or self.starts)

    def moved(self, lanes: slice, b: int) -> bool:
        """Whether the sums need scaling on the way to entry b."""
        return self._moved is None or any(self._moved[lane][b] for lane in range(lanes.start, lanes.stop))

    def windows(self, lanes: slice, blocks: range) -> Tensor:
        """The keys of block b - 1 and b, [g, n, 2W, D]."""
        before, own = self.key[lanes, blocks.start : blocks.stop], self.key[lanes, blocks.start + 1 : blocks.stop + 1]
        return torch.cat([before, own], 2)

    def read_entry(self, entries: Tensor, lanes: slice, blocks: range) -> Tensor:
        """Of [lanes, entries, m] those of the sums that the blocks read, [g, n, m]."""
        read = entries[lanes, max(0, blocks.start - 1) : blocks.stop - 1]
        return read if blocks.start else torch.cat([entries[lanes, :1], read], 1)

    def weights(self, lanes: slice, blocks: range) -> Weights:
        """The finished weights of some blocks of destinations."""
        some, own = slice(blocks.start, blocks.stop), slice(blocks.start + 1, blocks.stop + 1)
        logs = self.query[lanes, some] @ self.windows(lanes, blocks).transpose(-1, -2)
        rows = rows_of(lanes, self.heads)
        by_row = (rows.stop - rows.start, -1)
        if self.ids is None:
            logs.masked_fill_(~self.seen, NONE)
        else:
            sources = torch.cat([self.ids[rows, some], self.ids[rows, own]], 2)
            seen = self.seen & (self.ids[rows, own, :, None] == sources[:, :, None])
            logs.view(*by_row, *logs.shape[1:]).masked_fill_(~seen[:, None], NONE)
        if blocks.start == 0:
            logs[:, 0, :, : self.window] = NONE
        subtrahend = logs.amax(-1, keepdim=True)
        if self.features is None:
            pairs = logs.sub_(subtrahend).exp_()
            return Weights(pairs.div_(pairs.sum(-1, keepdim=True)), None, None)
        by_feature = both_ways(self.projected_query[lanes, some])
        by_feature += (self.log_scale[lanes, None, None] + self.offset[lanes, some])[:, :, None]
        if self.ids is not None:
            foreign = self.ids[rows, own] != self.document[rows, some, None]
            by_feature.view(*by_row, *by_feature.shape[1:]).masked_fill_(foreign[:, None, ..., None], NONE)
        subtrahend = torch.maximum(subtrahend, by_feature.amax(-1, keepdim=True))
        by_feature = by_feature.sub_(subtrahend).exp_()
        pairs = logs.sub_(subtrahend).exp_()
        far = by_feature @ self.far_keys[lanes, some].transpose(-1, -2)
        pairs[..., : self.window] += far.mul_(self.lower)
        on_sums = by_feature * self.scale[lanes, some, None]
        total = pairs.sum(-1, keepdim=True) + on_sums @ self.read_entry(self.total, lanes, blocks)[..., None]
        return Weights(pairs.div_(total), by_feature.div_(total), on_sums.div_(total))

    def unblocked(self, x: Tensor) -> Tensor:
        """[lanes, blocks, W, C] as [B, T, H, C]."""
        x = x.reshape(self.batch, self.heads, -1, x.shape[-1])
        return x[:, :, : self.tokens].transpose(1, 2)

    def _blocks(self, x: Tensor, front: int = 0) -> Tensor:
        """[B, T, H, C] as [lanes, front + blocks, W, C], filled up with zeros."""
        padding = [0, 0, front * self.window, self.count * self.window - self.tokens]
        return F.pad(x.transpose(1, 2), padding).reshape(self.lanes, front + self.count, self.window, x.shape[-1])

    def _per_lane(self, x: Tensor) -> Tensor:
        """[B, ...] as [lanes, ...]."""
        return x.repeat_interleave(self.heads, 0)

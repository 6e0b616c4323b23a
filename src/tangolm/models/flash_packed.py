"""FLASH's sum over sources where rows differ: packed documents, padding, or several tokens behind a state."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tangolm.models.flash_groups import KEPT, OPERANDS, Call, FlashState, within
from tangolm.models.layers import Layout


def regrouped(call: Call, layout: Layout, state: FlashState | None) -> Float[Tensor, "B T e"]:
    """Documents, padding, or tokens behind a state: groups begin anywhere, and elsewhere in each row.

    Each row becomes an array: the group in progress and then the new tokens, real ones moved to its end in order. There a
    group is contiguous and shorter than two blocks of G places, and a full one ends where its last place is taken. A row
    has no more full groups than blocks, whatever its documents, so all buffers have about its size.
    """
    group, (batch, tokens) = call.group, call.value.shape[:2]
    device = call.value.device
    places = torch.arange(group, device=device)
    valid = torch.ones((batch, tokens), dtype=torch.bool, device=device) if layout.mask is None else layout.mask
    positions = layout.positions.expand(batch, tokens)
    place, first = positions % group, (positions == 0) & valid
    operands = {name: getattr(call, name) for name in OPERANDS}
    if state is not None:
        if state.empty:
            state.start(call)
        held = state.tensors
        valid = torch.cat([places < held["fill"][:, None], valid], 1)
        place = torch.cat([places.expand(batch, group), place], 1)
        first = F.pad(first, (group, 0))
        for name in ("query", "far_query"):  # nobody reads what the group in progress attends to
            operands[name] = F.pad(operands[name], (0, 0, group, 0))
        for name in KEPT:
            operands[name] = torch.cat([held[name], operands[name]], 1)
    order = None
    if state is not None or layout.mask is not None:
        order = valid.to(torch.uint8).argsort(dim=1, stable=True)
        operands = {name: _take(x, order) for name, x in operands.items()}
        valid, place, first = (x.gather(1, order) for x in (valid, place, first))
    out = _near_in_blocks(call, operands, torch.where(valid, place, -1))
    sums = None if state is None else state.tensors["sums"]
    cells = _Cells(call, operands, valid & (place == group - 1), first.cumsum(1), valid, sums)
    if cells.count:
        out = out + cells.read(call, operands["far_query"], valid, place)
    if state is not None:
        _keep(state, cells, operands, valid, place)
    if order is not None:
        back = order.argsort(1)[:, -tokens:]
        out = _take(out, back).masked_fill(~valid.gather(1, back)[..., None], 0.0)
    return out


def _near_in_blocks(call: Call, operands: dict[str, Tensor], place: Tensor) -> Float[Tensor, "B A e"]:
    """The squared-ReLU part: a destination sees the `place` entries before it, in its block of G and the one before."""
    length, group = place.shape[1], call.group
    count = math.ceil(length / group)

    def blocks(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, count * group - length)).unflatten(1, (count, group))

    query, key, value = (blocks(operands[name]) for name in ("query", "key", "value"))
    reach = F.pad(place, (0, count * group - length), value=-1).unflatten(1, (count, group))[..., None]
    distance, seen = within(group, place.device)
    out = call.near(query, key, value, distance, seen & (distance <= reach))
    if count > 1:
        distance = distance + group
        before = call.near(query[:, 1:], key[:, :-1], value[:, :-1], distance, distance <= reach[:, 1:])
        out = torch.cat([out[:, :1], out[:, 1:] + before], 1)
    return out.flatten(1, 2)[:, :length]


class _Cells:
    """Full groups of the array, and before them the state's sum as one more; each with the sum up to its end.

    `documents` [B, A] number the documents of the array's entries; the state's is 0.
    """

    def __init__(
        self,
        call: Call,
        operands: dict[str, Tensor],
        ends: Tensor,
        documents: Tensor,
        valid: Tensor,
        start: Tensor | None,
    ) -> None:
        batch, length = ends.shape
        group, device = call.group, ends.device
        full = length // group
        self.documents, self.group, self.started = documents, group, start is not None
        self.count = full + self.started
        rank = torch.where(ends, ends.cumsum(1) - 1, full)
        where = torch.arange(length, device=device).expand(batch, length)
        end = where.new_zeros((batch, full + 1)).scatter(1, rank, where)[:, :full]
        exists = torch.arange(full, device=device) < ends.sum(1, keepdim=True)  # the others add zero
        members = (end[..., None] - (group - 1) + torch.arange(group, device=device)).clamp(min=0).flatten(1)
        far_key = _take(operands["far_key"], members).unflatten(1, (full, group))
        value = _take(operands["value"], members).unflatten(1, (full, group))
        sums = call.total(far_key.masked_fill(~exists[..., None, None], 0.0), value)
        document = documents.gather(1, end)
        if start is not None:
            sums = torch.cat([start[:, None], sums], 1)
            document = F.pad(document, (1, 0))
            end = torch.cat([length - valid.sum(1, keepdim=True) - 1, end], 1)
        self.own, self.document, self.end = sums, document, end
        self.before = ends.cumsum(1) - ends.long() + (0 if self.started else -1)  # the last full group before an entry

    def read(self, call: Call, far_query: Tensor, valid: Tensor, place: Tensor) -> Float[Tensor, "B A e"]:
        """What each entry reads of the groups before its own in its document."""
        length, places = place.shape[1], torch.arange(self.group, device=place.device)
        # A product with ones and zeros rather than differences of running sums: documents stay out of each other's rounding.
        earlier = torch.ones((self.count, self.count), dtype=torch.bool, device=place.device).tril()
        same = (self.document[:, :, None] == self.document[:, None, :]) & earlier
        sums = (same.to(self.own.dtype) @ self.own.flatten(2)).view(self.own.shape)
        readers = (self.end[..., None] + 1 + places).clamp(max=length - 1).flatten(1)
        query = _take(far_query, readers).unflatten(1, (self.count, self.group))
        read = call.far(query, sums).flatten(1, 2)
        cell = self.before.clamp(min=0)
        reads = valid & (self.before >= 0) & (self.document.gather(1, cell) == self.documents)
        return _take(read, cell * self.group + place).masked_fill(~reads[..., None], 0.0)

    def final(self) -> Float[Tensor, "B s e"]:
        """The sum over the full groups of each row's last document."""
        last = self.document == self.documents[:, -1:]
        return (last.to(self.own.dtype)[:, None] @ self.own.flatten(2)).view(self.own[:, 0].shape)


def _keep(state: FlashState, cells: _Cells, operands: dict[str, Tensor], valid: Tensor, place: Tensor) -> None:
    held, length = state.tensors, place.shape[1]
    fill = torch.where(valid[:, -1], (place[:, -1] + 1) % state.group, 0)
    places = torch.arange(state.group, device=place.device)
    entries = (length - fill[:, None] + places).clamp(max=length - 1)
    held["sums"], held["fill"] = cells.final(), fill
    for name in KEPT:
        held[name] = _take(operands[name], entries)


def _take(x: Float[Tensor, "B A c"], entries: Int[Tensor, "B K"]) -> Float[Tensor, "B K c"]:
    return x.gather(1, entries[..., None].expand(-1, -1, x.shape[-1]))

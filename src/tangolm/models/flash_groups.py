"""FLASH's sum over sources where the rows agree: one document from its first token on, or one token behind a state.

Also what all its forms share: the operands, the state in generation, and the loop-written reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tangolm.models.gated_unit import bias_at
from tangolm.models.layers import Layout

OPERANDS = ("query", "key", "far_query", "far_key", "value")
KEPT = ("key", "far_key", "value")  # of the group in progress


@dataclass(frozen=True)
class Call:
    """The operands: queries and keys [B, T, s] of both kinds in at least float32, values [B, T, e], the bias, G and L."""

    query: Tensor
    key: Tensor
    far_query: Tensor
    far_key: Tensor
    value: Tensor
    bias: Tensor
    group: int
    context: int

    def near(self, query: Tensor, key: Tensor, value: Tensor, distance: Tensor, seen: Tensor) -> Tensor:
        """The values weighted by squared ReLU, for the pairs seen."""
        scores = query @ key.transpose(-1, -2) / self.group + bias_at(distance, self.bias, query.dtype)
        return scores.masked_fill(~seen, 0.0).relu().square().to(value.dtype) @ value

    def total(self, far_key: Tensor, value: Tensor) -> Tensor:
        """Sum of k' v^T over the second last axis, in at least float32 from operands in the dtype of the values."""
        return (far_key.to(value.dtype).transpose(-1, -2) @ value).to(far_key.dtype)

    def far(self, far_query: Tensor, sums: Tensor) -> Tensor:
        """q' times the sums, divided by L."""
        dtype = self.value.dtype
        return far_query.to(dtype) @ (sums / self.context).to(dtype)


class FlashState:
    """Per row: the sum over finished groups of its last document, and the keys and values of the group in progress.

    Its size does not depend on the number of tokens. `fill` [B] counts the tokens of the group in progress, which stand in
    places 0 .. fill - 1; a full group moves into the sums at once.
    """

    def __init__(self, group: int) -> None:
        self.group = group
        self.tensors: dict[str, Tensor] = {}

    @property
    def empty(self) -> bool:
        """No call so far."""
        return not self.tensors

    def start(self, call: Call) -> None:
        """Make room for the rows of the first call."""
        batch, s, e = call.value.shape[0], call.query.shape[-1], call.value.shape[-1]
        self.tensors = {
            "sums": call.query.new_zeros((batch, s, e)),
            "key": call.query.new_zeros((batch, self.group, s)),
            "far_key": call.query.new_zeros((batch, self.group, s)),
            "value": call.value.new_zeros((batch, self.group, e)),
            "fill": torch.zeros(batch, dtype=torch.long, device=call.value.device),
        }

    def reorder(self, rows: Int[Tensor, " B"]) -> None:
        """Keep `rows` of the batch in that order (beam search)."""
        self.tensors = {name: tensor.index_select(0, rows) for name, tensor in self.tensors.items()}

    @property
    def bytes(self) -> int:
        """Memory of the sums and the group in progress."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def aligned(call: Call, state: FlashState | None) -> Float[Tensor, "B T e"]:
    """One document from its first token on, every token real: groups are slices."""
    tokens, group = call.value.shape[1], call.group
    size = min(group, tokens)
    count = math.ceil(tokens / size)

    def groups(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, count * size - tokens)).unflatten(1, (count, size))

    value = groups(call.value)
    distance, seen = within(size, value.device)
    out = call.near(groups(call.query), groups(call.key), value, distance, seen)
    sums = None
    if count > 1:
        sums = call.total(groups(call.far_key)[:, :-1], value[:, :-1]).cumsum(1)
        out = torch.cat([out[:, :1], out[:, 1:] + call.far(groups(call.far_query)[:, 1:], sums)], 1)
    if state is not None:
        state.start(call)
        held = state.tensors
        last = tokens - (count - 1) * size
        if sums is not None:
            held["sums"] += sums[:, -1]
        if last == group:
            held["sums"] += call.total(call.far_key[:, -group:], call.value[:, -group:])
        else:
            held["fill"] += last
            for name in KEPT:
                held[name][:, :last] = getattr(call, name)[:, -last:]
    return out.flatten(1, 2)[:, :tokens]


def step(call: Call, layout: Layout, state: FlashState) -> Float[Tensor, "B 1 e"]:
    """One token a row behind those of the state; rows may stand at different places of their groups."""
    held, group = state.tensors, call.group
    batch = call.value.shape[0]
    rows = torch.arange(batch, device=call.value.device)
    position = layout.positions[:, 0].expand(batch)
    place = position % group
    real = torch.ones_like(place, dtype=torch.bool) if layout.mask is None else layout.mask[:, 0]
    fresh = real & (position == 0)
    if bool(fresh.any()):
        held["sums"][fresh] = 0.0
    for name in KEPT:  # a padding token writes where the next real one will
        held[name][rows, place] = getattr(call, name)[:, 0]
    distance = (place[:, None] - torch.arange(group, device=place.device))[:, None]
    seen = (distance >= 0) & real[:, None, None]
    out = call.near(call.query, held["key"], held["value"], distance, seen)
    out = out + call.far(call.far_query, held["sums"]).masked_fill(~real[:, None, None], 0.0)
    held["fill"] = torch.where(real, (place + 1) % group, held["fill"])
    full = real & (place == group - 1)
    if bool(full.any()):
        held["sums"][full] += call.total(held["far_key"][full], held["value"][full])
    return out


def within(size: int, device: torch.device) -> tuple[Int[Tensor, "G G"], Tensor]:
    """Distances of the pairs of a block, and which of them causality allows."""
    places = torch.arange(size, device=device)
    distance = places[:, None] - places
    return distance, distance >= 0


def reference(call: Call, layout: Layout, state: FlashState | None) -> Float[Tensor, "B T e"]:
    """Group by group, and row by row where rows differ: the specification of the other forms."""
    tokens = call.value.shape[1]
    if state is None and layout.document_ids is None and layout.mask is None:
        return _walk(call, list(range(tokens)), None)
    if state is not None and state.empty:
        state.start(call)
    out = []
    for row in range(call.value.shape[0]):
        real = list(range(tokens)) if layout.mask is None else layout.mask[row].nonzero().flatten().tolist()
        index = torch.tensor(real, dtype=torch.long, device=call.value.device)
        positions = layout.positions.expand(call.value.shape[0], tokens)[row, index].tolist()
        own = replace(call, **{name: getattr(call, name)[row : row + 1, index] for name in OPERANDS})
        held = None if state is None else {name: tensor[row : row + 1] for name, tensor in state.tensors.items()}
        out.append(torch.zeros_like(call.value[row]).index_copy(0, index, _walk(own, positions, held)[0]))
    return torch.stack(out)


def _walk(call: Call, positions: list[int], held: dict[str, Tensor] | None) -> Float[Tensor, "B T e"]:
    """Tokens at these positions of one document after another; `held`, views of a state, is read and written."""
    if not positions:
        return call.value
    batch, s, e = call.value.shape[0], call.query.shape[-1], call.value.shape[-1]
    sums = call.query.new_zeros((batch, s, e)) if held is None else held["sums"].clone()
    fill = 0 if held is None else int(held["fill"])
    past = {name: getattr(call, name)[:, :0] if held is None else held[name][:, :fill] for name in KEPT}
    out = [call.value[:, :0]]
    for start, end in _runs(positions, call.group):
        place = positions[start] % call.group
        if positions[start] == 0:
            sums = torch.zeros_like(sums)
        if place == 0:
            past = {name: x[:, :0] for name, x in past.items()}
        past = {name: torch.cat([x, getattr(call, name)[:, start:end]], 1) for name, x in past.items()}
        size = past["value"].shape[1]
        distance, seen = within(size, call.value.device)
        near = call.near(call.query[:, start:end], past["key"], past["value"], distance[place:], seen[place:])
        out.append(near + call.far(call.far_query[:, start:end], sums))
        if size == call.group:
            sums = sums + call.total(past["far_key"], past["value"])
    if held is not None:
        size = past["value"].shape[1] % call.group
        held["sums"].copy_(sums)
        held["fill"].fill_(size)
        for name, x in past.items():
            held[name][:, :size] = x[:, :size]
    return torch.cat(out, 1)


def _runs(positions: list[int], group: int) -> Iterator[tuple[int, int]]:
    """Stretches of tokens of one group."""
    start = 0
    for t in range(1, len(positions) + 1):
        if t == len(positions) or positions[t] % group == 0:
            yield start, t
            start = t

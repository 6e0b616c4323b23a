"""Depth: one block applied N times (looped), or N blocks (untied).

h <- h + block_n(h),  n = 1..N
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tangolm.models.layers import Application, Layout
from tangolm.models.recompute import recomputed

if TYPE_CHECKING:
    from tangolm.models.base import Block


class Depth(nn.Module):
    """`applications` applications of the given blocks: one for all, or one each.

    `recompute`: keep little of each application for the backward pass (see `models.recompute`).
    """

    def __init__(self, blocks: list[Block], applications: int) -> None:
        super().__init__()
        assert len(blocks) in (1, applications)
        self.blocks = nn.ModuleList(blocks)
        self.applications = applications
        self.recompute = False

    def at(self, n: int) -> Block:
        """The block of application n, counted from 0."""
        return self[n % len(self.blocks)]

    def forward(
        self, h: Float[Tensor, "B T d"], layout: Layout, rotation: int | None, states: list[Any] | None = None
    ) -> Float[Tensor, "B T d"]:
        for n in range(self.applications):
            block, application = self.at(n), Application(n, rotation)
            if self.recompute and states is None and torch.is_grad_enabled():
                h = h + recomputed(block, h, layout, application)
            else:
                h = h + block(h, layout, application, None if states is None else states[n])
        return h

    def __getitem__(self, index: int) -> Block:
        return cast("Block", self.blocks[index])

    def __iter__(self) -> Iterator[Block]:
        return iter(cast("Iterator[Block]", self.blocks))

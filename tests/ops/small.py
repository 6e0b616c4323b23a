"""Implementations under test, among them the blocked one with tiles so small that little inputs cross every boundary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from tangolm.ops import IMPLS, tiles

SMALL_TILES = "chunked, small tiles"
EVERY = (*IMPLS, SMALL_TILES)


@contextmanager
def small_tiles() -> Iterator[None]:
    """Blocks of 8 destinations, strips of 16, one or two heads a tile."""
    with (
        mock.patch.object(tiles, "BLOCKS", {8: 1.0}),
        mock.patch.object(tiles, "STRIP", 16),
        mock.patch.object(tiles, "TILE", 2 * 8 * 32),
    ):
        yield


def implementation(name: str):
    """The function of that name."""
    if name != SMALL_TILES:
        return IMPLS[name]

    def chunked(*args: Tensor | None) -> Tensor:
        return _Small.apply(*args)  # type: ignore[no-any-return]

    return chunked


class _Small(torch.autograd.Function):
    """Small tiles in the backward too, whenever it runs."""

    @staticmethod
    def forward(ctx, *args):
        with small_tiles(), torch.enable_grad():
            leaves = [
                tensor.detach().requires_grad_() if tensor is not None and tensor.is_floating_point() else tensor
                for tensor in args
            ]
            out = IMPLS["chunked"](*leaves)
        ctx.leaves, ctx.out = leaves[:4], out
        return out.detach()

    @staticmethod
    def backward(ctx, grad):
        with small_tiles():
            return *torch.autograd.grad(ctx.out, ctx.leaves, grad, retain_graph=True), None, None

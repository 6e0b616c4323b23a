"""Rotating narrow width: the gated width in S equal segments, of which one application computes one.

Application n at offset t (the optimizer step in training) takes segment (n + t) mod S, so that a step costs about 1/S of
the width's operations. A segment's channels, head by head, are padded with zeros to the packed width, a multiple that
matrix products like. Nothing but the active segment's weights enters the products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from tangolm.models.layers import Application


@dataclass(frozen=True)
class Segments:
    """`count` segments of `channels` a head, each padded to a multiple of `multiple`."""

    count: int
    heads: int
    channels: int
    multiple: int

    @property
    def size(self) -> int:
        """Channels of a segment in a head; the last one may have fewer."""
        return math.ceil(self.channels / self.count)

    @property
    def packed(self) -> int:
        """Channels of a head that are computed."""
        return self.channels if self.count == 1 else math.ceil(self.size / self.multiple) * self.multiple

    @property
    def active_width(self) -> int:
        """Channels that an application computes, all heads."""
        return self.heads * self.packed

    def active(self, application: Application) -> int | None:
        """The segment that an application takes; None: all."""
        if self.count == 1 or application.rotation is None:
            return None
        return (application.index + application.rotation) % self.count

    def rows(self, weight: Float[Tensor, "F d"], segment: int | None) -> Float[Tensor, "P d"]:
        """The rows of a projection into the gated width that belong to a segment, padded."""
        if segment is None:
            return weight
        start = segment * self.size
        part = weight.unflatten(0, (self.heads, self.channels))[:, start : start + self.size]
        return F.pad(part, (0, 0, 0, self.packed - part.shape[1])).flatten(0, 1)

    def columns(self, weight: Float[Tensor, "d F"], segment: int | None) -> Float[Tensor, "d P"]:
        """The columns of a projection out of the gated width that belong to a segment, padded."""
        if segment is None:
            return weight
        start = segment * self.size
        part = weight.unflatten(1, (self.heads, self.channels))[:, :, start : start + self.size]
        return F.pad(part, (0, self.packed - part.shape[2])).flatten(1)

"""Small parts that several architectures share: RMSNorm in float32, RoPE, the unit norm, the layout of a call.

RMSNorm(x) = w * x / sqrt(mean(x^2) + eps)
rope_p(x)  = (x1 cos(p f) - x2 sin(p f), x2 cos(p f) + x1 sin(p f)),  x1, x2 the halves of x,  f_i = base^(-i / (D/2))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root mean square norm with a learned scale, computed in at least float32 and returned in the input's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(dtype), (x.shape[-1],), self.weight.to(dtype), self.eps).to(x.dtype)


@dataclass(frozen=True)
class Layout:
    """Where the tokens of one call stand; the same for every application of a block.

    `positions` [B or 1, T] count the real tokens of each document from 0; `tables` are RoPE's cosines and sines, each
    [B or 1, T, 1, D/2], or None; `document_ids` and `mask` are [B, T] or None.
    """

    positions: Int[Tensor, "B T"]
    tables: tuple[Tensor, Tensor] | None
    document_ids: Int[Tensor, "B T"] | None
    mask: Bool[Tensor, "B T"] | None

    def rope(self, x: Float[Tensor, "B T H D"]) -> Float[Tensor, "B T H D"]:
        """Rotate by the tokens' positions, in the tables' dtype (at least float32)."""
        assert self.tables is not None
        cos, sin = self.tables
        first, second = x.to(cos.dtype).chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@dataclass(frozen=True)
class Application:
    """Which application of the depth this is: `index` n from 0, and the `rotation` offset (None: all segments)."""

    index: int
    rotation: int | None = 0


def rope_tables(
    positions: Int[Tensor, "B T"], head_width: int, base: float, dtype: torch.dtype
) -> tuple[Float[Tensor, "B T 1 half"], Float[Tensor, "B T 1 half"]]:
    """Cosines and sines of RoPE for these positions.

    The angles are formed in float64 where the device has it: in float32 position 8,191 would be off by up to 5e-4 rad.
    """
    wide = torch.float32 if positions.device.type == "mps" else torch.float64
    exponent = torch.arange(head_width // 2, device=positions.device, dtype=wide) / (head_width // 2)
    angle = positions.to(wide)[..., None, None] * base**-exponent
    dtype = torch.promote_types(dtype, torch.float32)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def unit(x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
    """x / |x|_2 along the last axis in at least float32; a zero vector stays zero, with a finite gradient."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.normalize(x.to(dtype), dim=-1, eps=1e-12)


def split_heads(x: Float[Tensor, "B T d"], heads: int) -> Float[Tensor, "B T H D"]:
    """View the last axis as heads of equal width."""
    return x.unflatten(-1, (heads, -1))

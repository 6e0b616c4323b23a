"""Compact-controller TANGO (the paper's low-dimensional variant): r channels a head are averaged instead of E.

    c_j = SiLU(W_c x_j) in R^(r H)      y_i = W_o ((W_e sum_{j<=i} a_ij c_j) * (W_u x_i))

The weights a_ij are TANGO's. W_c: d x r H; W_e: r x E a head, with no nonlinearity behind it; W_u: d x F; W_o: F x d. The
interaction costs T^2 r H instead of T^2 F. Parameters at r H = d: 2dF + rF + 3d^2 + 2d + H.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tangolm import ops
from tangolm.models.layers import Application, Layout, split_heads
from tangolm.models.tango import AveragingBlock, AveragingConfig


@dataclass(frozen=True, kw_only=True)
class CompactTangoConfig(AveragingConfig):
    """Compact-controller TANGO; `controller_width` r is the channels of a head that are averaged."""

    architecture: Literal["compact-tango"] = "compact-tango"
    controller_width: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least_one("controller_width")
        if self.segments != 1:
            raise ValueError(f"segments must be 1: the compact controller's width does not rotate, got {self.segments}")

    def block_parameters(self) -> int:
        return self._weights() + self.width + self.heads

    def block_macs(self, tokens: int, pairs: int) -> int:
        return tokens * self._weights() + pairs * (self.width + self.controller_width * self.heads)

    def _weights(self) -> int:
        d, r = self.width, self.controller_width
        return 2 * d * self.gated_width + r * self.gated_width + 2 * d * d + d * r * self.heads


class CompactTangoBlock(AveragingBlock):
    """The compact-controller update of h; its cache holds controllers."""

    def __init__(self, config: CompactTangoConfig, impl: str = "auto") -> None:
        super().__init__(config, impl)
        d, gated, r = config.width, config.gated_width, config.controller_width
        self.controller = nn.Linear(d, r * self.heads, bias=False)
        self.expansion = nn.Parameter(torch.zeros(self.heads, r, gated // self.heads))
        self.projection = nn.Linear(d, gated, bias=False)
        self.output = nn.Linear(gated, d, bias=False)

    def forward(
        self, h: Float[Tensor, "B T d"], layout: Layout, application: Application, state: Any = None
    ) -> Float[Tensor, "B T d"]:
        x = self.norm(h)
        mean = split_heads(self.average(x, self.controller(x), layout, state), self.heads)
        gate = torch.einsum("bthr,hre->bthe", mean, self.expansion.to(mean.dtype)).flatten(2)
        return ops.gated_product(gate, self.projection(x), self.output.weight, impl=self.impl)

    def outputs(self) -> Iterable[nn.Linear]:
        return [self.output]

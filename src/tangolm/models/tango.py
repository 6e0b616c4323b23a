"""TANGO (arXiv:2608.22117): one update in place of attention and feed-forward.

With x = RMSNorm(h), per head of width 32:

    q_i = rope_i(W_q x_i / |.|_2)    k_j = rope_j(W_k x_j / |.|_2)    s_ij = tau <q_i, k_j>
    a_ij = exp(s_ij) / sum_{j'<=i} exp(s_ij')
    g_j = SiLU(W_g x_j)              y_i = W_o ((sum_{j<=i} a_ij g_j) * (W_u x_i))

W_q, W_k: d x d; W_g, W_u: d x F; W_o: F x d; no biases; tau one a head, stored as its logarithm. With T = 1 the block is a
SwiGLU feed-forward. Parameters of the model: 3dF + 2d^2 + 2d + H.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from tangolm import ops
from tangolm.models.base import Block, ModelConfig
from tangolm.models.layers import Layout, RMSNorm, split_heads, unit


@dataclass(frozen=True, kw_only=True)
class TangoConfig(ModelConfig):
    """TANGO; `gated_width` F is a multiple of the heads. `initial_temperature` is tau before training."""

    architecture: Literal["tango"] = "tango"
    looped: bool = True
    initial_temperature: float = 12.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gated_width % self.heads:
            raise ValueError(f"gated_width must be a multiple of the {self.heads} heads, got {self.gated_width}")
        if not self.initial_temperature > 0:
            raise ValueError(f"initial_temperature must be above 0, got {self.initial_temperature}")

    def block_parameters(self) -> int:
        d = self.width
        return 3 * d * self.gated_width + 2 * d * d + d + self.heads

    def block_macs(self, tokens: int, pairs: int) -> int:
        d, F_ = self.width, self.gated_width
        return tokens * (3 * d * F_ + 2 * d * d) + pairs * (d + F_)


class TangoBlock(Block):
    """The TANGO update of h."""

    def __init__(self, config: TangoConfig, impl: str = "auto") -> None:
        super().__init__()
        d, gated = config.width, config.gated_width
        self.heads = config.heads
        self.impl = ops.choose(impl)
        self.norm = RMSNorm(d, config.norm_eps)
        self.query = nn.Linear(d, d, bias=False)
        self.key = nn.Linear(d, d, bias=False)
        self.gate = nn.Linear(d, gated, bias=False)
        self.projection = nn.Linear(d, gated, bias=False)
        self.output = nn.Linear(gated, d, bias=False)
        self.log_temperature = nn.Parameter(torch.full((self.heads,), math.log(config.initial_temperature)))

    def forward(
        self, h: Float[Tensor, "B T d"], layout: Layout, state: ops.Sources | None = None
    ) -> Float[Tensor, "B T d"]:
        x = self.norm(h)
        gates = ops.aggregate_gates(
            query=layout.rope(unit(split_heads(self.query(x), self.heads))),
            key=layout.rope(unit(split_heads(self.key(x), self.heads))),
            gate=split_heads(F.silu(self.gate(x)), self.heads),
            temperature=self.temperature,
            document_ids=layout.document_ids,
            mask=layout.mask,
            state=state,
            impl=self.impl,
        )
        return self.output(gates.flatten(2) * self.projection(x))

    @property
    def temperature(self) -> Float[Tensor, " H"]:
        """tau, one a head, in at least float32."""
        return self.log_temperature.to(torch.promote_types(self.log_temperature.dtype, torch.float32)).exp()

    def new_state(self) -> ops.Sources:
        return ops.Sources()

    def outputs(self) -> Iterable[nn.Linear]:
        return [self.output]

"""TANGO (arXiv:2608.22117): one update in place of attention and feed-forward.

With x = RMSNorm(h), per head of width 32:

    q_i = rope_i(W_q x_i / |.|_2)    k_j = rope_j(W_k x_j / |.|_2)    s_ij = tau <q_i, k_j>
    a_ij = exp(s_ij) / sum_{j'<=i} exp(s_ij')
    g_j = SiLU(W_g x_j)              y_i = W_o ((sum_{j<=i} a_ij g_j) * (W_u x_i))

W_q, W_k: d x d; W_g, W_u: d x F; W_o: F x d; no biases; tau one a head, stored as its logarithm. With T = 1 the block is a
SwiGLU feed-forward. Parameters of the model: 3dF + 2d^2 + 2d + H.

Several sets: k narrower triples (W_g, W_u, W_o), of which a schedule gives each application one; W_q, W_k, tau and the norm
are shared. Parameters: k 3dF + 2d^2 + 2d + H.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from tangolm import ops
from tangolm.models.base import Block, HeadsConfig
from tangolm.models.layers import Application, Layout, RMSNorm, split_heads, unit
from tangolm.models.rotating import Segments

PACKED_MULTIPLE = 16  # channels of a head


@dataclass(frozen=True, kw_only=True)
class AveragingConfig(HeadsConfig):
    """An architecture whose sources are averaged by TANGO's weights; `gated_width` F is a multiple of the heads.

    Args:
        initial_temperature: tau before training.
    """

    looped: bool = True
    initial_temperature: float = 12.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.positive("initial_temperature")
        if self.gated_width % self.heads:
            raise ValueError(f"gated_width must be a multiple of the {self.heads} heads, got {self.gated_width}")


@dataclass(frozen=True, kw_only=True)
class TangoConfig(AveragingConfig):
    """TANGO.

    Args:
        sets: k triples (W_g, W_u, W_o) of width F each.
        set_schedule: which set each application takes, counted from 0; None: the first application the first set, the last
            the last, those between them the sets between in order (three sets: all the middle one).
    """

    architecture: Literal["tango"] = "tango"
    sets: int = 1
    set_schedule: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least_one("sets")
        if self.sets > 1 and not self.looped:
            raise ValueError(f"sets must be 1 where looped is false (each block has its own), got {self.sets}")
        if self.set_schedule is not None and len(self.set_schedule) != self.depth:
            raise ValueError(f"set_schedule must have depth = {self.depth} items, got {len(self.set_schedule)}")
        if set(self.schedule) != set(range(self.sets)):
            raise ValueError(f"set_schedule {self.schedule} must use each of {self.sets} sets (from 0) and no other")

    @property
    def schedule(self) -> tuple[int, ...]:
        """The set of each application."""
        if self.set_schedule is not None:
            return self.set_schedule
        last, inner = self.sets - 1, max(1, self.sets - 2)
        between = [min(last, 1 + n * inner // max(1, self.depth - 2)) for n in range(self.depth - 2)]
        return tuple([0, *between, last][: self.depth]) if last else (0,) * self.depth

    @property
    def segmented(self) -> Segments:
        """The gated width in its segments."""
        return Segments(self.segments, self.heads, self.gated_width // self.heads, PACKED_MULTIPLE)

    def block_parameters(self) -> int:
        d = self.width
        return self.sets * 3 * d * self.gated_width + 2 * d * d + d + self.heads

    def block_macs(self, tokens: int, pairs: int) -> int:
        d, active = self.width, self.segmented.active_width
        return tokens * (3 * d * active + 2 * d * d) + pairs * (d + active)


class GatedSet(nn.Module):
    """W_g, W_u and W_o."""

    def __init__(self, width: int, gated_width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, gated_width, bias=False)
        self.projection = nn.Linear(width, gated_width, bias=False)
        self.output = nn.Linear(gated_width, width, bias=False)


class AveragingBlock(Block):
    """Queries, keys and temperatures, and the average of what the sources emit."""

    def __init__(self, config: AveragingConfig, impl: str) -> None:
        super().__init__()
        d = config.width
        self.heads = config.heads
        self.impl = ops.choose(impl)
        self.norm = RMSNorm(d, config.norm_eps)
        self.query = nn.Linear(d, d, bias=False)
        self.key = nn.Linear(d, d, bias=False)
        self.log_temperature = nn.Parameter(torch.full((self.heads,), math.log(config.initial_temperature)))

    def average(
        self, x: Float[Tensor, "B T d"], emitted: Float[Tensor, "B T C"], layout: Layout, state: Any
    ) -> Float[Tensor, "B T C"]:
        """For each destination the average of SiLU of what its sources emit, head by head."""
        query, key = (layout.rope(unit(split_heads(matrix(x), self.heads))) for matrix in (self.query, self.key))
        return self.aggregate(query, key, split_heads(emitted, self.heads), layout, state).flatten(2)

    def aggregate(
        self, query: Tensor, key: Tensor, emitted: Tensor, layout: Layout, state: Any
    ) -> Float[Tensor, "B T H E"]:
        """The average of the sources' gates, SiLU of what they emit, for each destination."""
        return ops.aggregate_gates(
            query,
            key,
            emitted,
            self.temperature,
            document_ids=layout.document_ids,
            mask=layout.mask,
            state=state,
            silu=True,
            impl=self.impl,
        )

    @property
    def temperature(self) -> Float[Tensor, " H"]:
        """tau, one a head, in at least float32."""
        return self.log_temperature.to(torch.promote_types(self.log_temperature.dtype, torch.float32)).exp()

    def new_state(self) -> Any:
        return ops.Sources()


class TangoBlock(AveragingBlock):
    """The TANGO update of h."""

    def __init__(self, config: TangoConfig, impl: str = "auto") -> None:
        super().__init__(config, impl)
        self.schedule, self.segments = config.schedule, config.segmented
        self.sets = nn.ModuleList(GatedSet(config.width, config.gated_width) for _ in range(config.sets))

    def forward(
        self, h: Float[Tensor, "B T d"], layout: Layout, application: Application, state: Any = None
    ) -> Float[Tensor, "B T d"]:
        x = self.norm(h)
        own, segment = self.set_of(application), self.segments.active(application)
        mean = self.average(x, F.linear(x, self.segments.rows(own.gate.weight, segment)), layout, state)
        u = F.linear(x, self.segments.rows(own.projection.weight, segment))
        return ops.gated_product(mean, u, self.segments.columns(own.output.weight, segment), impl=self.impl)

    def set_of(self, application: Application) -> GatedSet:
        """The triple that an application takes."""
        return cast(GatedSet, self.sets[self.schedule[application.index]])

    def outputs(self) -> Iterable[nn.Linear]:
        return [cast(GatedSet, own).output for own in self.sets]

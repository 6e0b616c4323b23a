"""What GAU and FLASH (Hua et al. 2022, arXiv:2202.10447) share: the projections around a single head of width s.

    x = LayerNorm(h)    u = SiLU(W_u x + b_u)    v = SiLU(W_v x + b_v)    z = SiLU(W_z x + b_z)
    q, k, ... = z * scale + offset, a pair each        block(h) = W_o (u * (A v)) + b_o

W_u, W_v: d x e; W_z: d x s; W_o: e x d. The interaction A is the child's; it adds a learned bias to the squared-ReLU scores
that depends on the distance alone (a Toeplitz matrix of 2 n - 1 entries, of which causality uses n).

Initial values: biases of projections and offsets 0; scales 1, so that q = k = z; the bias of every distance 1 / sqrt(n). The
scores, divided by n, start near 0, where squared ReLU has no gradient; with this bias the last of n tokens starts with the
plain average of their values.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tangolm.models.base import Block, ModelConfig
from tangolm.models.layers import Application, Layout


@dataclass(frozen=True, kw_only=True)
class GatedUnitConfig(ModelConfig):
    """GAU or FLASH; `gated_width` is e.

    Args:
        shared_width: s, channels of queries and keys.
        rope_base: base of RoPE on all queries and keys; None: the bias alone tells the distance.
    """

    looped: bool = False
    shared_width: int = 128
    rope_base: float | None = None

    pairs: ClassVar[int]  # scales and offsets, one a kind of query or key

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least_one("shared_width")
        if self.rope_base is not None:
            self.positive("rope_base")
            if self.shared_width % 2:
                raise ValueError(f"shared_width must be even with rope_base (it turns pairs), got {self.shared_width}")

    @property
    def heads(self) -> int:
        """One head, of width s."""
        return 1

    @property
    def rope(self) -> tuple[int, float] | None:
        return None if self.rope_base is None else (self.shared_width, self.rope_base)

    @property
    @abstractmethod
    def longest(self) -> int:
        """n: the squared-ReLU scores are divided by it, and their bias reaches distances below it."""

    def block_parameters(self) -> int:
        d, e, s = self.width, self.gated_width, self.shared_width
        projections = 3 * d * e + d * s + 2 * e + s + d
        return projections + self.pairs * 2 * s + 2 * d + 2 * self.longest - 1


class GatedUnit(Block):
    """The update of h around the interaction that `attend` brings."""

    def __init__(self, config: GatedUnitConfig) -> None:
        super().__init__()
        d, e, s = config.width, config.gated_width, config.shared_width
        self.context, self.longest = config.context, config.longest
        self.shared_width, self.turns = s, config.rope_base is not None
        self.norm = LayerNorm(d, eps=config.norm_eps)
        self.gate = nn.Linear(d, e)
        self.value = nn.Linear(d, e)
        self.shared = nn.Linear(d, s)
        # Vectors rather than matrices: they start as set here and do not decay.
        self.scale = nn.Parameter(torch.ones(config.pairs * s))
        self.offset = nn.Parameter(torch.zeros(config.pairs * s))
        self.distance_bias = nn.Parameter(torch.full((2 * self.longest - 1,), self.longest**-0.5))
        self.output = nn.Linear(e, d)
        for linear in (self.gate, self.value, self.shared, self.output):
            nn.init.zeros_(linear.bias)

    def forward(
        self, h: Float[Tensor, "B T d"], layout: Layout, application: Application, state: Any = None
    ) -> Float[Tensor, "B T d"]:
        x = self.norm(h)
        z = F.silu(self.shared(x))
        dtype = torch.promote_types(z.dtype, torch.float32)
        scale, offset = (pair.to(dtype).view(-1, self.shared_width) for pair in (self.scale, self.offset))
        kinds = z.to(dtype)[:, :, None] * scale + offset
        if self.turns:
            kinds = layout.rope(kinds)
        value = F.silu(self.value(x))
        with torch.autocast(h.device.type, enabled=False):
            attended = self.attend(list(kinds.unbind(2)), value, layout, state)
        return self.output(F.silu(self.gate(x)) * attended)

    @abstractmethod
    def attend(
        self, kinds: list[Float[Tensor, "B T s"]], value: Float[Tensor, "B T e"], layout: Layout, state: Any
    ) -> Float[Tensor, "B T e"]:
        """A v in the dtype of v; the queries and keys are in at least float32. Called without autocast."""

    def outputs(self) -> Iterable[nn.Linear]:
        return [self.output]


class LayerNorm(nn.LayerNorm):
    """LayerNorm with bias, computed in at least float32 and returned in the input's dtype."""

    def forward(self, input: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        dtype = torch.promote_types(input.dtype, torch.float32)
        weight, bias = self.weight.to(dtype), self.bias.to(dtype)
        return F.layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps).to(input.dtype)


def bias_at(distance: Int[Tensor, "..."], bias: Float[Tensor, " entries"], dtype: torch.dtype) -> Float[Tensor, "..."]:
    """The bias of these distances (destination minus source), of which causality uses those from 0 on."""
    longest = (bias.shape[0] + 1) // 2
    entries = (distance + (longest - 1)).clamp(0, bias.shape[0] - 1)
    # index_select: by far the fastest backward of the ways to look up (it sums into one vector).
    return bias.to(dtype).index_select(0, entries.flatten()).view(distance.shape)


def refuse_gradient(value: Tensor) -> None:
    """A state is written in place, so nothing that needs a gradient may enter it.

    Raises:
        ValueError: a value that needs a gradient.
    """
    if torch.is_grad_enabled() and value.requires_grad:
        raise ValueError("a cache is for inference: call the model under torch.no_grad()")

"""Transformer++: pre-RMSNorm, RoPE attention with heads of 32, SwiGLU, no biases. Looped, untied, conventional.

    a = W_o Attention(RoPE(W_q x), RoPE(W_k x), W_v x),  x = RMSNorm(h)
    block(h) = a + W_down (SiLU(W_gate z) * (W_up z)),   z = RMSNorm(h + a)

Parameters of the model: looped 3dF + 4d^2 + 3d, untied N (3dF + 4d^2 + 2d) + d.
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

from tangolm.config import suggest
from tangolm.models.base import Block, HeadsConfig
from tangolm.models.layers import Application, Layout, RMSNorm, split_heads
from tangolm.models.rotating import Segments
from tangolm.ops import Sources
from tangolm.ops.reference import visible

ATTENTION = ("sdpa", "reference")
PACKED_MULTIPLE = 128  # channels of the feed-forward


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(HeadsConfig):
    """Transformer++; `looped` tells the Loop Transformer++ from the Untied one."""

    architecture: Literal["transformer"] = "transformer"

    @property
    def segmented(self) -> Segments:
        """The feed-forward width in its segments."""
        return Segments(self.segments, 1, self.gated_width, PACKED_MULTIPLE)

    def block_parameters(self) -> int:
        d = self.width
        return 3 * d * self.gated_width + 4 * d * d + 2 * d

    def block_macs(self, tokens: int, pairs: int) -> int:
        d = self.width
        return tokens * (3 * d * self.segmented.active_width + 4 * d * d) + pairs * 2 * d


class TransformerBlock(Block):
    """Attention and SwiGLU as one update of h."""

    def __init__(self, config: TransformerConfig, impl: str = "auto") -> None:
        super().__init__()
        d, width = config.width, config.gated_width
        self.heads, self.segments = config.heads, config.segmented
        if impl != "auto" and impl not in ATTENTION:
            raise ValueError(
                f"impl {impl!r} is not an implementation of attention{suggest(impl, ['auto', *ATTENTION])}"
            )
        self.impl = "sdpa" if impl == "auto" else impl
        self.attention_norm = RMSNorm(d, config.norm_eps)
        self.query = nn.Linear(d, d, bias=False)
        self.key = nn.Linear(d, d, bias=False)
        self.value = nn.Linear(d, d, bias=False)
        self.attention_output = nn.Linear(d, d, bias=False)
        self.feed_forward_norm = RMSNorm(d, config.norm_eps)
        self.gate = nn.Linear(d, width, bias=False)
        self.up = nn.Linear(d, width, bias=False)
        self.down = nn.Linear(width, d, bias=False)

    def forward(
        self, h: Float[Tensor, "B T d"], layout: Layout, application: Application, state: Sources | None = None
    ) -> Float[Tensor, "B T d"]:
        x = self.attention_norm(h)
        value = split_heads(self.value(x), self.heads)
        query = layout.rope(split_heads(self.query(x), self.heads)).to(value.dtype)
        key = layout.rope(split_heads(self.key(x), self.heads)).to(value.dtype)
        document_ids, mask = layout.document_ids, layout.mask
        if state is not None:
            key, value, document_ids, mask = state.extend(key, value, document_ids, mask)
        attended = attention(query, key, value, document_ids, mask, self.impl)
        a = self.attention_output(attended.flatten(2))
        z = self.feed_forward_norm(h + a)
        segment = self.segments.active(application)
        gate, up = (F.linear(z, self.segments.rows(matrix.weight, segment)) for matrix in (self.gate, self.up))
        return a + F.linear(F.silu(gate) * up, self.segments.columns(self.down.weight, segment))

    def new_state(self) -> Sources:
        return Sources()

    def outputs(self) -> Iterable[nn.Linear]:
        return [self.attention_output, self.down]


def attention(
    query: Float[Tensor, "B T H D"],
    key: Float[Tensor, "B S H D"],
    value: Float[Tensor, "B S H D"],
    document_ids: Tensor | None,
    mask: Tensor | None,
    impl: str,
) -> Float[Tensor, "B T H D"]:
    """Causal softmax attention of the last T of S tokens, within documents and among real tokens."""
    tokens, sources = query.shape[1], key.shape[1]
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    seen = None
    if document_ids is not None or mask is not None or (impl == "reference") or (1 < tokens < sources):
        seen = visible(tokens, sources, document_ids, mask, query.device)
        if mask is not None:
            # A padded destination sees itself alone, so that its row is finite; nobody reads it.
            itself = (
                torch.arange(sources, device=query.device)
                == torch.arange(sources - tokens, sources, device=query.device)[:, None]
            )
            seen = seen | itself
        seen = seen[:, None]
    if impl == "sdpa":
        causal = seen is None and tokens > 1
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, is_causal=causal)
    else:
        assert seen is not None
        scores = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32))
        scores = (scores / math.sqrt(query.shape[-1])).masked_fill(~seen, -torch.inf)
        out = scores.softmax(-1).to(value.dtype) @ value
    return out.transpose(1, 2)

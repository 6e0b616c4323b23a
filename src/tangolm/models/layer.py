"""TANGO as a layer for modules of one's own: in place of attention and feed-forward."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tangolm.models.base import draw
from tangolm.models.cache import Cache, layout_of
from tangolm.models.layers import Application
from tangolm.models.tango import TangoBlock, TangoConfig
from tangolm.ops import check_documents


class TangoLayer(nn.Module):
    """The TANGO update of a sequence of vectors; add it to its input: `h = h + layer(h)`.

    It brings its own RMSNorm and RoPE. Applied several times it is the paper's looped model.

    Args:
        width: d, a multiple of `head_width`.
        gated_width: F, a multiple of the heads; the paper's models have F about 50 d.
        depth: N, applications of all layers together; scales the initial output projection by 1 / sqrt(2 N).
        head_width: channels of a head's query and key.
        initial_temperature: tau before training.
        impl: of `tangolm.ops.aggregate_gates`.

    Raises:
        ValueError: a width that does not divide into heads, a value out of range.
    """

    def __init__(
        self,
        width: int,
        gated_width: int,
        *,
        depth: int = 1,
        head_width: int = 32,
        initial_temperature: float = 12.0,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        self.config = TangoConfig(
            vocab_size=1,  # a layer has neither vocabulary nor context
            context=1,
            depth=depth,
            width=width,
            gated_width=gated_width,
            head_width=head_width,
            initial_temperature=initial_temperature,
        )
        self.block = TangoBlock(self.config, impl)
        draw(self, [self.block], self.config, None)

    def forward(
        self,
        h: Float[Tensor, "B T d"],
        attention_mask: Tensor | None = None,
        document_ids: Int[Tensor, "B T"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "B T d"]:
        """The update of h.

        Args:
            h: vectors of width d.
            attention_mask: [B, T], nonzero at real tokens; None: all real.
            document_ids: non-decreasing along a row; tokens of different documents do not see each other.
            cache: from `new_cache`, one for each application; this call goes on behind its tokens, without gradient.

        Raises:
            ValueError: shapes that do not fit, document ids that decrease.
        """
        mask = None if attention_mask is None else attention_mask.to(torch.bool)
        if not torch.compiler.is_compiling():
            if h.ndim != 3 or h.shape[-1] != self.config.width:
                raise ValueError(f"h must be [B, T, {self.config.width}], got {tuple(h.shape)}")
            if h.shape[1] == 0:
                raise ValueError(f"h must have at least one token, got {tuple(h.shape)}")
            if cache is not None:
                cache.check(self.config, h.shape[0])
            check_documents(document_ids, mask, *h.shape[:2], mask_name="attention_mask")
        like = torch.zeros(h.shape[:2], dtype=torch.long, device=h.device)
        layout = layout_of(like, mask, document_ids, cache, self.config, h.dtype)
        return self.block(h, layout, Application(0), None if cache is None else cache.states[0])

    def new_cache(self, batch_size: int) -> Cache:
        """An empty cache for one application of the layer."""
        return Cache(self.config, [self.block.new_state()], batch_size)

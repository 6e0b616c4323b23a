"""The sums over the sources that have left every window: per head and feature, of phi(k_j) and of phi(k_j) g_j^T.

    Z_f = sum_j exp(l_jf - o_f)      S_f = sum_j exp(l_jf - o_f) g_j,      l_jf the logarithm of feature f of k_j

The offset o_f follows the largest l_jf of the document, in steps of more than `SLACK`, so that nothing overflows and what
underflows is below e^-60 of its own feature's sum, at any temperature. The offset looks back only, hence at no later token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

SLACK = 20.0  # e^20 leaves room for the sum of any number of sources
PADDING = torch.iinfo(torch.long).min  # padding is a document of its own, in front of the others
NONE = -1e30  # the offset of an empty sum; finite, so that differences are


class Sums(NamedTuple):
    """Sums over the sources of one document: offset o and total Z [B, H, m], gates S [B, H, m, E], document [B]."""

    offset: Float[Tensor, "B H m"]
    total: Float[Tensor, "B H m"]
    gates: Float[Tensor, "B H m E"]
    document: Int[Tensor, " B"]

    @staticmethod
    def empty(batch: int, heads: int, features: int, channels: int, dtype: torch.dtype, device: torch.device) -> Sums:
        """Sums over no source."""
        total = torch.zeros((batch, heads, features), dtype=dtype, device=device)
        gates = torch.zeros((batch, heads, features, channels), dtype=dtype, device=device)
        document = torch.zeros(batch, dtype=torch.long, device=device)
        return Sums(torch.full_like(total, NONE), total, gates, document)

    def absorb(
        self,
        log_keys: Float[Tensor, "B H W m"],
        gate: Float[Tensor, "B W H E"],
        document_ids: Int[Tensor, "B W"] | None,
    ) -> Sums:
        """These sums and a block of sources that follow, of which the last document counts from here on; padding does not."""
        own = goes_on = None
        peaks, before, document = log_keys.detach(), self.offset, self.document
        if document_ids is not None:
            document = last_document(document_ids[:, -1], self.document)
            own = (document_ids == document[:, None])[:, None, :, None]
            goes_on = (document == self.document)[:, None, None]
            peaks, before = peaks.masked_fill(~own, NONE), before.masked_fill(~goes_on, NONE)
        offset = raised(before, peaks.amax(2))
        scale = (before - offset).exp()
        weights = (log_keys - offset[:, :, None]).clamp(max=SLACK).exp()
        if own is not None and goes_on is not None:
            # Where another document begins the old sums go; their scale is 0 already unless the offset stayed at NONE.
            scale, weights = scale.masked_fill(~goes_on, 0.0), weights.masked_fill(~own, 0.0)
        wide = self.gates.dtype
        added = torch.einsum("bhwm,bwhe->bhme", weights.to(wide), gate.to(wide))
        gates = self.gates * scale[..., None].to(wide) + added
        return Sums(offset, self.total * scale + weights.sum(2), gates, document)


def last_document(ids: Tensor, document: Tensor) -> Tensor:
    """The document of sums of `document` behind a block whose last token is of `ids`: padding changes nothing."""
    return torch.where(ids == PADDING, document, ids)


def raised(offset: Tensor, peak: Tensor) -> Tensor:
    """The offset where `peak` stays within the slack above it, else the peak."""
    return torch.where(peak > offset + SLACK, peak, offset)

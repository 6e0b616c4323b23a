"""The paper's gate averaging as written, O(T^2) in time and memory: the specification that every other form is judged by.

    s_ij = tau <q_i, k_j>      a_ij = exp(s_ij) / sum_{j'<=i} exp(s_ij')      out_i = sum_{j<=i} a_ij g_j

Scores and weights are formed in at least float32; finished weights are rounded once to the gate's dtype. Any dtype up to
float64 is taken.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


def aggregate_gates(
    query: Float[Tensor, "B T H D"],
    key: Float[Tensor, "B S H D"],
    gate: Float[Tensor, "B S H E"],
    temperature: Float[Tensor, " H"],
    document_ids: Int[Tensor, "B S"] | None,
    mask: Bool[Tensor, "B S"] | None,
    silu: bool = False,
) -> Float[Tensor, "B T H E"]:
    """Average the gates for the last T of S sources; arguments as in `tangolm.ops.aggregate_gates`, state already joined."""
    gate = F.silu(gate) if silu else gate
    dtype = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        scores = torch.einsum("bthd,bshd->bhts", query.to(dtype), key.to(dtype))
        scores = scores * temperature.to(dtype)[:, None, None]
        sources = visible(query.shape[1], key.shape[1], document_ids, mask, query.device)  # [B or 1, T, S]
        scores = scores.masked_fill(~sources[:, None], -torch.inf)
        # A destination without any source (a padded one) gets zeros instead of 0/0.
        weights = scores.softmax(-1).masked_fill(~sources.any(-1)[:, None, :, None], 0.0)
        return torch.einsum("bhts,bshe->bthe", weights.to(gate.dtype), gate)


def visible(
    queries: int,
    sources: int,
    document_ids: Int[Tensor, "B S"] | None,
    mask: Bool[Tensor, "B S"] | None,
    device: torch.device | str,
) -> Bool[Tensor, "B T S"]:
    """Which source each destination averages: not later, of the same document, both real. The batch axis is 1 if all rows agree."""
    row = torch.arange(sources - queries, sources, device=device)[:, None]
    column = torch.arange(sources, device=device)[None, :]
    seen = (column <= row)[None]
    if document_ids is not None:
        seen = seen & (document_ids[:, -queries:, None] == document_ids[:, None, :])
    if mask is not None:
        seen = seen & mask[:, -queries:, None] & mask[:, None, :]
    return seen

"""GAU, the gated attention unit of Hua et al. 2022 (arXiv:2202.10447): one head, squared ReLU, cost quadratic in T.

    A_ij = relu(<q_i, k_j> / L + bias_{i-j})^2    for j <= i, else 0

with L the context, and q, k, u, v of `gated_unit`. N independent layers. A model has no bias beyond its context, so more
tokens than that are an error. Distances count real tokens, and the model's parameters are
N (3de + ds + 2e + s + d + 4s + 2d + 2L - 1) + d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tangolm.config import suggest
from tangolm.models.cache import positions_in_documents
from tangolm.models.gated_unit import GatedUnit, GatedUnitConfig, bias_at
from tangolm.models.gau_blocked import blocked
from tangolm.models.layers import Layout
from tangolm.ops import Sources
from tangolm.ops.reference import visible


@dataclass(frozen=True, kw_only=True)
class GauConfig(GatedUnitConfig):
    """GAU; `context` is its limit: the bias has 2 context - 1 entries."""

    architecture: Literal["gau"] = "gau"
    pairs = 2

    @property
    def longest(self) -> int:
        return self.context

    @property
    def limit(self) -> int:
        return self.context

    def block_macs(self, tokens: int, pairs: int) -> int:
        d, e, s = self.width, self.gated_width, self.shared_width
        return tokens * (3 * d * e + d * s) + pairs * (s + e)


class GauBlock(GatedUnit):
    """The GAU update of h."""

    def __init__(self, config: GauConfig, impl: str = "auto") -> None:
        super().__init__(config)
        if impl != "auto" and impl not in IMPLS:
            raise ValueError(f"impl {impl!r} is not an implementation of GAU{suggest(impl, ['auto', *IMPLS])}")
        self.impl = "blocked" if impl == "auto" else impl

    def attend(
        self, kinds: list[Float[Tensor, "B T s"]], value: Float[Tensor, "B T e"], layout: Layout, state: Any
    ) -> Float[Tensor, "B T e"]:
        query, key = kinds
        document_ids, mask = layout.document_ids, layout.mask
        if state is not None:
            keys, values, document_ids, mask = state.extend(key[:, :, None], value[:, :, None], document_ids, mask)
            key, value = keys.squeeze(2), values.squeeze(2)
        positions = None
        if mask is not None:
            documents = torch.zeros_like(mask, dtype=torch.long) if document_ids is None else document_ids
            positions = positions_in_documents(documents, mask)
        # One destination has no triangle to save: the equation itself is the fastest form.
        impl = "reference" if query.shape[1] == 1 else self.impl
        return IMPLS[impl](query, key, value, self.distance_bias, document_ids, mask, positions)

    def new_state(self) -> Sources:
        return Sources()


def reference(
    query: Float[Tensor, "B T s"],
    key: Float[Tensor, "B S s"],
    value: Float[Tensor, "B S e"],
    bias: Float[Tensor, " entries"],
    document_ids: Int[Tensor, "B S"] | None,
    mask: Bool[Tensor, "B S"] | None,
    positions: Int[Tensor, "B S"] | None,
) -> Float[Tensor, "B T e"]:
    """The equation as written, for the last T of S sources; memory is O(T S).

    Args:
        query, key: in at least float32; `bias` has 2L - 1 entries, and scores are divided by L.
        document_ids, mask: as in `tangolm.ops.aggregate_gates`.
        positions: of the real tokens in their documents; None: every token is real, and places tell the distance.
    """
    tokens, sources = query.shape[1], key.shape[1]
    if positions is None:
        positions = torch.arange(sources, device=key.device)[None]
    distance = positions[:, -tokens:, None] - positions[:, None, :]
    seen = visible(tokens, sources, document_ids, mask, key.device)
    scores = query @ key.transpose(1, 2) / ((bias.shape[0] + 1) // 2) + bias_at(distance, bias, query.dtype)
    weights = scores.masked_fill(~seen, 0.0).relu().square()
    return weights.to(value.dtype) @ value


IMPLS = {"reference": reference, "blocked": blocked}

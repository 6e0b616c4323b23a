"""FLASH (Hua et al. 2022, arXiv:2202.10447): squared ReLU inside groups, causal linear attention across them.

With c(i) the group of token i, G tokens each, counted from its document's first real token, and L the context:

    y_i = sum_{j<=i, c(j)=c(i)} relu(<q_i, k_j> / G + bias_{i-j})^2 v_j   +   q'_i sum_{c(j)<c(i)} k'_j v_j^T / L

over the tokens of one document; q, k, q', k', u, v of `gated_unit`. N independent layers, linear cost, and a state of
constant size in generation. The model's parameters are N (3de + ds + 2e + s + d + 8s + 2d + 2G - 1) + d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from tangolm.config import suggest
from tangolm.models.flash_groups import Call, FlashState, aligned, reference, step
from tangolm.models.flash_packed import regrouped
from tangolm.models.gated_unit import GatedUnit, GatedUnitConfig, refuse_gradient
from tangolm.models.layers import Layout

IMPLS = ("grouped", "reference")


@dataclass(frozen=True, kw_only=True)
class FlashConfig(GatedUnitConfig):
    """FLASH.

    Args:
        group: G, tokens of a group; the bias has 2G - 1 entries.
    """

    architecture: Literal["flash"] = "flash"
    group: int = 256
    pairs = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least_one("group")

    @property
    def longest(self) -> int:
        return self.group

    def block_macs(self, tokens: int, pairs: int) -> int:
        d, e, s = self.width, self.gated_width, self.shared_width
        return tokens * (3 * d * e + d * s + self.group * (s + e) + 2 * s * e)

    def macs(self, tokens: int | None = None) -> dict[str, int]:
        """As for every model; the useful ones are the pairs of a group in order, k'v of the groups that a later one reads,
        and q' of the groups that read."""
        counted = super().macs(tokens)
        tokens = self.context if tokens is None else tokens
        e, s, last = self.gated_width, self.shared_width, (tokens - 1) % self.group + 1
        earlier = tokens - last
        pairs = earlier * (self.group + 1) // 2 + last * (last + 1) // 2
        reading = max(0, tokens - self.group)
        waste = tokens * self.group * (s + e) - pairs * (s + e) + (2 * tokens - earlier - reading) * s * e
        return counted | {"useful_macs": counted["macs"] - self.depth * waste}


class FlashBlock(GatedUnit):
    """The FLASH update of h."""

    def __init__(self, config: FlashConfig, impl: str = "auto") -> None:
        super().__init__(config)
        if impl != "auto" and impl not in IMPLS:
            raise ValueError(f"impl {impl!r} is not an implementation of FLASH{suggest(impl, ['auto', *IMPLS])}")
        self.impl = "grouped" if impl == "auto" else impl
        self.group = config.group

    def attend(
        self, kinds: list[Float[Tensor, "B T s"]], value: Float[Tensor, "B T e"], layout: Layout, state: Any
    ) -> Float[Tensor, "B T e"]:
        if state is not None:
            refuse_gradient(value)
        query, key, far_query, far_key = kinds
        call = Call(query, key, far_query, far_key, value, self.distance_bias, self.group, self.context)
        if self.impl == "reference":
            return reference(call, layout, state)
        plain = layout.document_ids is None and layout.mask is None
        if plain and (state is None or state.empty):
            return aligned(call, state)
        if state is not None and not state.empty and value.shape[1] == 1:
            return step(call, layout, state)
        return regrouped(call, layout, state)

    def new_state(self) -> FlashState:
        return FlashState(self.group)

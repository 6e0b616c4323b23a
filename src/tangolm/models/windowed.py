"""Windowed TANGO (the paper's first version calls it WANGO): TANGO at linear cost, with a state of constant size.

The block and its parameters are TANGO's. A destination weights the last W tokens of its document in full, and older ones by
features phi in R^m a head that estimate the same unnormalised weight; both kinds are added and normalised together:

    mean_i = (sum_{i-W<j<=i} exp(s_ij) g_j + sum_{j<=i-W} phi(q_i)^T phi(k_j) g_j) / (the same without g_j)

phi: `tangolm.ops.features`; no parameters, directions that the model seed draws. A sequence of W tokens is TANGO's exactly.
Products of a sequence: N T [3dF + 2d^2 + 2W (d + F) + 2mF] + TdV.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tangolm import ops
from tangolm.models.layers import Layout
from tangolm.models.tango import TangoBlock, TangoConfig


@dataclass(frozen=True, kw_only=True)
class WindowedTangoConfig(TangoConfig):
    """Windowed TANGO.

    Args:
        window: W, tokens of its document that a destination weights in full, itself included.
        features: the map that weights older ones: "random" (positive orthogonal random features), "exponential"
            (elementwise), or "none" (older tokens do not count).
        feature_count: m, features a head; two for each direction, so the exponential map has 2 head_width.
    """

    architecture: Literal["windowed-tango"] = "windowed-tango"  # pyright: ignore[reportIncompatibleVariableOverride]
    window: int = 64
    features: Literal["random", "exponential", "none"] = "random"
    feature_count: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least_one("window")
        if self.feature_count < 2 or self.feature_count % 2:
            raise ValueError(f"feature_count must be even (two for each direction), got {self.feature_count}")
        if self.features == "exponential" and self.feature_count != 2 * self.head_width:
            raise ValueError(
                f"feature_count must be 2 head_width = {2 * self.head_width} with exponential features, "
                f"got {self.feature_count}"
            )

    def block_macs(self, tokens: int, pairs: int) -> int:
        """All that the blockwise form multiplies: two blocks of W a destination (no more than there are tokens), and each
        token into and out of the sums. `pairs` does not matter."""
        far = 2 * self._far_width() if tokens > self.window else 0
        return super().block_macs(tokens, tokens * min(2 * self.window, tokens)) + tokens * far

    def macs(self, tokens: int | None = None) -> dict[str, int]:
        """As for every model; the useful ones are pairs in the window, the tokens that leave it, and those that others left."""
        counted = super().macs(tokens)
        tokens = self.context if tokens is None else tokens
        full = min(tokens, self.window)
        pairs = full * (full + 1) // 2 + (tokens - full) * self.window
        useful = super().block_macs(tokens, pairs) + 2 * (tokens - full) * self._far_width()
        waste = self.block_macs(tokens, 0) - useful
        return counted | {"useful_macs": counted["macs"] - self.depth * waste}

    def _far_width(self) -> int:
        """Products of a token with the sums, either way."""
        return 0 if self.features == "none" else self.feature_count * self.segmented.active_width


class WindowedTangoBlock(TangoBlock):
    """The Windowed TANGO update of h."""

    directions: Tensor | None

    def __init__(self, config: WindowedTangoConfig, impl: str = "auto") -> None:
        super().__init__(config, impl)
        self.window, self.features = config.window, config.features
        directions = None
        if config.features != "none":
            directions = torch.zeros(config.heads, config.feature_count // 2, config.head_width)
        self.register_buffer("directions", directions)  # persistent: a checkpoint keeps what the seed drew

    def aggregate(
        self, query: Tensor, key: Tensor, emitted: Tensor, layout: Layout, state: Any
    ) -> Float[Tensor, "B T H E"]:
        return ops.aggregate_gates(
            query,
            key,
            emitted,
            self.temperature,
            window=self.window,
            features=self.directions,
            document_ids=layout.document_ids,
            mask=layout.mask,
            state=state,
            silu=True,
            impl=self.impl,
        )

    def new_state(self) -> ops.WindowState:
        return ops.WindowState()

    def draw_buffers(self, generator: torch.Generator | None) -> None:
        if self.directions is not None:
            heads, count, width = self.directions.shape
            self.directions.copy_(ops.FEATURES[self.features](heads, count, width, generator))

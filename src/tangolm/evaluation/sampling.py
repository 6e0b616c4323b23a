"""Choosing the next token from the logits of one position.

    temperature 0:   argmax
    otherwise:       p = softmax(logits / temperature), cut to the top_k most likely, then to the smallest set of most
                     likely tokens whose probability reaches top_p, and inverted at a uniform number

All in float64 on the host, so that a seed gives the same tokens on every device that gives the same logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


def on_host(logits: Float[Tensor, "B V"], vocab_size: int) -> Float[Tensor, "B V"]:
    """Logits of one position without the columns from `vocab_size` on, as float32 on the CPU.

    Raises:
        ValueError: some are not numbers.
    """
    logits = logits[:, :vocab_size].detach().to("cpu", torch.float32)
    if bool(logits.isnan().any()):
        raise ValueError("the model's logits are not numbers (NaN); its weights are damaged or have diverged")
    return logits


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    Args:
        temperature: 0 takes the most likely token.
        top_k: keep that many most likely tokens; more than there are keeps all. None: all.
        top_p: keep the most likely tokens that together have this probability. None: all.

    Raises:
        ValueError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 (most likely token) or above, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")

    def next_tokens(
        self, logits: Float[Tensor, "B V"], vocab_size: int, uniform: Float[Tensor, " B"]
    ) -> Int[Tensor, " B"]:
        """One token a row.

        Args:
            logits: of one position; columns from `vocab_size` on (padding of the embedding) are never chosen.
            vocab_size: V without padding.
            uniform: a number in [0, 1) a row; unused at temperature 0.

        Returns:
            Tokens on the CPU.

        Raises:
            ValueError: logits that are not numbers.
        """
        logits = on_host(logits, vocab_size)
        if self.temperature == 0:
            return logits.argmax(-1)
        probability, token = self.distribution(logits)
        cumulative = probability.cumsum(-1)
        # Against the last sum instead of 1: rounding must not run past the last token that is left.
        target = uniform.to(torch.float64)[:, None] * cumulative[:, -1:]
        index = torch.searchsorted(cumulative, target, right=True)
        last = (probability > 0).sum(-1, keepdim=True) - 1
        return token.gather(1, index.minimum(last))[:, 0]

    def distribution(self, logits: Float[Tensor, "B V"]) -> tuple[Float[Tensor, "B V"], Int[Tensor, "B V"]]:
        """Probabilities (most likely first, 0 where cut off, not normalised again) and their tokens."""
        logits = logits.to(torch.float64)
        # The largest becomes 0 first: a tiny temperature must not make infinity of it.
        probability = ((logits - logits.amax(-1, keepdim=True)) / self.temperature).softmax(-1)
        probability, token = probability.sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            probability[:, self.top_k :] = 0
        if self.top_p is not None:
            reached = probability.cumsum(-1) - probability  # before this token
            probability[reached >= self.top_p * probability.sum(-1, keepdim=True)] = 0
        return probability, token

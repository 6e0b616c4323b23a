"""Activation recomputation: of each application of a block only its input and its costly product are kept for the backward pass.

For TANGO these are h, the update and the averages, T x d, T x d and T x F; what sources emit and projections (two products of
T x d with d x F) are formed again. The averaging itself, attention and GAU's product, T^2 of work, are never done twice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

KEPT = frozenset(
    {
        "tangolm::aggregate_gates",
        "tangolm::aggregate_gates_windowed",
        "tangolm::gated_product",
        "tangolm::gau",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
    }
)


def keeps(operator: Any) -> bool:
    """Whether the results of an operator are kept."""
    return operator.name() in KEPT


def recomputed(block: Callable[..., Tensor], h: Tensor, *arguments: Any) -> Tensor:
    """`block(h, *arguments)`, its other activations formed again in the backward pass; nothing in it may be random."""
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(block, h, *arguments, use_reentrant=False, context_fn=contexts, preserve_rng_state=False)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if keeps(operator) else CheckpointPolicy.PREFER_RECOMPUTE

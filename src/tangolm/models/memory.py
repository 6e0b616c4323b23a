"""How much memory a training step holds, found by tracing it on fake tensors: nothing is computed or allocated.

weights, gradients and AdamW's two moments: 16 bytes a parameter in float32
+ every tensor that autograd keeps for the backward pass, each storage once
  (recomputing: what `models.recompute` keeps of each application, and all that one of them keeps while it is formed again)
+ the logits that the head holds at a time
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tangolm.models.base import LanguageModel, ModelConfig, supervised
from tangolm.models.build import MODELS
from tangolm.models.recompute import keeps
from tangolm.ops.loss import BLOCK_LOGITS

BYTES_PER_PARAMETER = 16
LARGEST_TENSOR = 2**60  # numbers


def training_memory_bytes(
    config: ModelConfig,
    batch_size: int = 1,
    precision: str = "float32",
    impl: str = "auto",
    recompute: bool = False,
) -> int:
    """Estimated bytes at the start of the backward pass of one step.

    Args:
        config: the model; sequences have its context.
        batch_size: sequences in the step.
        precision: "float32", or "bf16" for autocast with float32 weights.
        impl: the implementation of the tokens' interaction.
        recompute: whether activations are formed again in the backward pass.

    Raises:
        ValueError: sizes beyond what a tensor can have.
    """
    if batch_size * config.context * max(config.vocab_size, config.gated_width) > LARGEST_TENSOR:
        sizes = f"batch_size {batch_size}, context {config.context}, vocab_size {config.vocab_size}"
        raise ValueError(f"{sizes}: together beyond what a tensor can hold; take smaller ones")
    saved, kept = _traced(config, batch_size, precision, impl)
    if recompute:
        # With one application fewer the trace shows what one keeps; looped and untied are alike in that.
        fewer = dataclasses.replace(config, **_one_fewer(config))
        one = saved - _traced(fewer, batch_size, precision, impl)[0] if config.depth > 1 else 0
        inputs = 4 * batch_size * config.context * config.width
        saved = saved - (config.depth - 1) * one + kept + config.depth * inputs
    parameters = config.parameters()["total"]
    logits = 4 * min(batch_size * config.context * config.vocab_size, max(BLOCK_LOGITS, config.vocab_size))
    return BYTES_PER_PARAMETER * parameters + saved + logits


def _one_fewer(config: ModelConfig) -> dict[str, Any]:
    depth = max(1, config.depth - 1)
    sets = getattr(config, "sets", 1)
    return {"depth": depth} if sets == 1 else {"depth": depth, "set_schedule": None, "sets": min(sets, depth)}


class _Kept(TorchDispatchMode):
    """Adds up what the operators return that recomputation does not repeat."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if keeps(func):
            tensors = result if isinstance(result, tuple | list) else (result,)
            self.bytes += sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
        return result


def _traced(config: ModelConfig, batch_size: int, precision: str, impl: str) -> tuple[int, int]:
    """Bytes that autograd keeps, and those of them that come from the operators which are never repeated."""
    seen: set[int] = set()
    held: list[Tensor] = []  # keeps storages alive, so that an identity stands for one storage only
    saved = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal saved
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            held.append(tensor)
            saved += storage.nbytes()
        return tensor

    with FakeTensorMode():
        model = LanguageModel(config, MODELS[config.architecture][1], impl)
        for tensor in [*model.parameters(), *model.buffers()]:
            seen.add(tensor.untyped_storage()._cdata)
        tokens = torch.zeros((batch_size, config.context), dtype=torch.long)
        autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16")
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast, _Kept() as operators:
            _ = model.mean_nll(model.hidden(tokens), tokens, supervised(tokens))
    return saved, operators.bytes

"""How much memory a training step holds, found by tracing it on fake tensors: nothing is computed or allocated.

weights, gradients and AdamW's two moments: 16 bytes a parameter in float32
+ every tensor that autograd keeps for the backward pass, each storage once
+ the logits that the head holds at a time
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tangolm.models.base import LanguageModel, ModelConfig, supervised
from tangolm.models.build import MODELS
from tangolm.ops.loss import BLOCK_LOGITS

BYTES_PER_PARAMETER = 16
LARGEST_TENSOR = 2**60  # numbers


def training_memory_bytes(
    config: ModelConfig, batch_size: int = 1, precision: str = "float32", impl: str = "auto"
) -> int:
    """Estimated bytes at the start of the backward pass of one step.

    Args:
        config: the model; sequences have its context.
        batch_size: sequences in the step.
        precision: "float32", or "bf16" for autocast with float32 weights.
        impl: the implementation of the tokens' interaction.

    Raises:
        ValueError: sizes beyond what a tensor can have.
    """
    if batch_size * config.context * max(config.vocab_size, config.gated_width) > LARGEST_TENSOR:
        sizes = f"batch_size {batch_size}, context {config.context}, vocab_size {config.vocab_size}"
        raise ValueError(f"{sizes}: together beyond what a tensor can hold; take smaller ones")
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
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
            _ = model.mean_nll(model.hidden(tokens), tokens, supervised(tokens))
    parameters = config.parameters()["total"]
    logits = 4 * min(batch_size * config.context * config.vocab_size, max(BLOCK_LOGITS, config.vocab_size))
    return BYTES_PER_PARAMETER * parameters + saved + logits

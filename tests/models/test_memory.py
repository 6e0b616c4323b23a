"""The memory estimate against what a real step saves."""

from __future__ import annotations

import pytest
import torch

from tangolm.models import build_model, training_memory_bytes
from tests.models.tiny import EVERY, tiny


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("batch", [1, 3])
def test_estimate_equals_what_autograd_saves(family: str, batch: int) -> None:
    config = tiny(family)
    model = build_model(config)
    own = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in own:
            saved[pointer] = tensor
        return tensor

    ids = torch.zeros(batch, config.context, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids, labels=ids).loss
    assert loss is not None
    measured = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    fixed = 16 * config.parameters()["total"] + 4 * batch * config.context * config.vocab_size
    assert training_memory_bytes(config, batch) - fixed == pytest.approx(measured, rel=0.02)


def test_precision_and_implementation_count() -> None:
    config = tiny("tango", context=256, gated_width=256)
    assert training_memory_bytes(config, precision="bf16") < training_memory_bytes(config)
    assert training_memory_bytes(config, impl="reference") > training_memory_bytes(config)

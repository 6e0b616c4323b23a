"""Recomputed activations give the same bits as kept ones, hold less memory, and go through the compiler."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tangolm.models import LanguageModel, build_model, training_memory_bytes
from tests.models.tiny import EVERY, tiny


def gradients(model: LanguageModel, ids: Tensor, documents: Tensor | None = None) -> list[Tensor]:
    loss = model(ids, labels=ids, document_ids=documents).loss
    assert loss is not None
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_same_bits(family: str, packed: bool) -> None:
    model = build_model(tiny(family))
    ids = torch.randint(tiny(family).vocab_size, (2, 27), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([0] * 5 + [1] + [2] * 21).expand(2, -1) if packed else None
    plain = gradients(model, ids, documents)
    model.recompute()
    again = gradients(model, ids, documents)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_costly_products_are_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Count(TorchDispatchMode):
        averages = products = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.averages += func is torch.ops.tangolm.aggregate_gates.default
            self.products += func is torch.ops.tangolm.gated_product.default
            return func(*args, **(kwargs or {}))

    config = tiny("tango")
    model = build_model(config)
    model.recompute()
    with Count() as count:
        gradients(model, torch.zeros(1, 9, dtype=torch.long))
    assert count.averages == count.products == config.depth


@pytest.mark.parametrize("family", EVERY)
def test_the_estimate_shrinks(family: str) -> None:
    config = tiny(family, depth=4)
    estimates = [training_memory_bytes(config, recompute=on) for on in (False, True)]
    assert estimates[1] < estimates[0]


def test_compiles_without_a_graph_break() -> None:
    model = build_model(tiny("tango"))
    ids = torch.randint(97, (2, 27), generator=torch.Generator().manual_seed(0))
    model.recompute()
    plain = gradients(model, ids)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss = compiled(ids, labels=ids).loss
    for a, b in zip(plain, [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_generation_does_not_care() -> None:
    model = build_model(tiny("tango"))
    ids = torch.arange(9)[None]
    with torch.no_grad():
        plain = model(ids, cache=model.new_cache(1)).logits
        model.recompute()
        assert torch.equal(plain, model(ids, cache=model.new_cache(1)).logits)

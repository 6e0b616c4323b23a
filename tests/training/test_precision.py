"""Under bf16 autocast products are bfloat16; norms, scores, exponentials, normalisers and the loss are at least float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tangolm.models import LanguageModel, build_model
from tangolm.training import Run, RunConfig, train
from tests.models.tiny import EVERY
from tests.models.tiny import tiny as tiny_model

# What autocast may do in bfloat16: products that accumulate in float32, what moves or joins their results, SiLU of a projection.
# (Attention's own scores and softmax are float32 inside its kernel.) Whatever else takes a bfloat16 tensor is a fault.
NARROW = {
    "products": "mm addmm bmm _scaled_dot_product_flash_attention_for_cpu",
    "projections": "silu silu_ mul.Tensor add.Tensor",
    "moves": "_to_copy _unsafe_view alias clone copy_ constant_pad_nd detach expand permute select.int slice.Tensor split.Tensor "
    "t transpose.int unsqueeze squeeze.dim view cat where.self masked_fill.Scalar gather index.Tensor index_copy zeros_like",
}
OWN = {  # our operators, and which of their arguments are scores' operands
    "tangolm::aggregate_gates": ("query", "key", "temperature"),
    "tangolm::aggregate_gates_windowed": ("query", "key", "temperature"),
    "tangolm::gated_product": (),
    "tangolm::gau": (),
}
ALLOWED = {f"aten::{name}" for names in NARROW.values() for name in names.split()} | set(OWN)


class Narrow(TorchDispatchMode):
    """Remembers the operators that take bfloat16 tensors, and every operand of a score that is one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.scores: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        for name, value in [*zip(names, args, strict=False), *(kwargs or {}).items()]:
            if isinstance(value, Tensor) and value.dtype == torch.bfloat16:
                self.seen.add(func.name())
                if name in OWN.get(func.name(), ()):
                    self.scores.add(f"{func.name()} {name}")
        return func(*args, **(kwargs or {}))


def forward(model: LanguageModel) -> tuple[Narrow, Tensor]:
    ids = torch.arange(24)[None]
    with Narrow() as narrow, torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids, document_ids=(torch.arange(24) // 7)[None]).loss
    assert loss is not None
    return narrow, loss


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_what_must_be_wide_is_wide(family: str, impl: str) -> None:
    narrow, loss = forward(build_model(tiny_model(family), impl=impl))
    assert narrow.seen, "nothing was in bfloat16: this test sees nothing"
    assert narrow.seen <= ALLOWED
    assert narrow.scores == set()
    assert loss.dtype == torch.float32


def test_weights_moments_and_gradients_stay_float32(
    tiny: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: set[tuple[str, torch.dtype]] = set()
    step = torch.optim.AdamW.step

    def spy(self: torch.optim.AdamW, *arguments: Any) -> None:
        step(self, *arguments)
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            assert parameter.grad is not None
            kinds.add(("weight", parameter.dtype))
            kinds.add(("gradient", parameter.grad.dtype))
            kinds.update((name, value.dtype) for name, value in self.state[parameter].items())

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    run = Run(train(tiny(precision="bf16", steps=2), tmp_path / "run", progress=False).folder)
    assert {dtype for _, dtype in kinds} == {torch.float32}
    assert len(kinds) == 5
    assert {tensor.dtype for tensor in run.load("last").state_dict().values()} == {torch.float32}


def test_auto_says_what_it_picked(
    tiny: Callable[..., RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(train(tiny(steps=1), tmp_path / "run").folder)
    environment = run.environment()
    assert environment is not None
    assert (environment["precision"], environment["device"]) == ("float32", "cpu")
    assert environment["impl"] != "auto"
    assert f", float32, impl {environment['impl']}" in capsys.readouterr().err

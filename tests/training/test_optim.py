"""The optimizer's groups, its float32 rule, and the learning rate of each step."""

from __future__ import annotations

import math

import pytest
import torch

import tangolm
from tangolm.config import ConfigError
from tangolm.data.loader import Batch
from tangolm.training.distributed import Parallel
from tangolm.training.environment import Place
from tangolm.training.optim import OptimizerConfig, build_optimizer, learning_rate, parameter_groups, warmup_steps
from tangolm.training.update import update

SMALL = {"vocab_size": 97, "context": 32, "depth": 2, "gated_width": 64}


@pytest.mark.case(23)
def test_warm_up_reaches_the_peak_exactly() -> None:
    config = OptimizerConfig(peak_lr=6e-4, warmup=2_000)
    rates = [learning_rate(config, step, 10_000) for step in range(1, 10_001)]
    assert rates[0] > 0
    assert rates[1_999] == 6e-4
    assert max(rates) == 6e-4
    assert rates[:2_000] == sorted(rates[:2_000])
    assert rates[1_999:] == sorted(rates[1_999:], reverse=True)
    assert rates[-1] == pytest.approx(6e-5, rel=1e-12)
    middle = learning_rate(config, 6_000, 10_000)
    assert middle == pytest.approx(6e-4 * (0.1 + 0.9 * 0.5), rel=1e-12)


@pytest.mark.parametrize(
    ("warmup", "steps", "expected"), [(0.02, 1_000, 20), (0.02, 5, 1), (0.0, 5, 0), (0, 5, 0), (5, 5, 5), (1, 1, 1)]
)
def test_warm_up_steps(warmup: float, steps: int, expected: int) -> None:
    config = OptimizerConfig(peak_lr=1.0, warmup=warmup)
    assert warmup_steps(config, steps) == expected
    assert all(0 < learning_rate(config, step, steps) <= 1.0 for step in range(1, steps + 1))


def test_warm_up_longer_than_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.warmup is 20 steps but the run has 10"):
        warmup_steps(OptimizerConfig(peak_lr=1.0, warmup=20), 10)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peak_lr", 0.0),
        ("peak_lr", math.inf),
        ("peak_lr", math.nan),
        ("betas", (0.9, 1.0)),
        ("betas", (-0.1, 0.9)),
        ("eps", 0.0),
        ("weight_decay", -0.1),
        ("clip", 0.0),
        ("warmup", 1.0),
        ("warmup", -1),
        ("warmup", True),
        ("final_fraction", 1.1),
    ],
)
def test_value_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be"):
        OptimizerConfig(**{"peak_lr": 1e-3, field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("preset", ["tango-mini-d4", "loop-mini-d4", "untied-mini-d4"])
def test_only_matrices_decay(preset: str) -> None:
    model = tangolm.build_model(tangolm.preset(preset, **SMALL))
    decayed, kept = parameter_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1
    assert kept["weight_decay"] == 0.0
    names = {"decayed": decayed["names"], "kept": kept["names"]}
    every = [name for name, _ in model.named_parameters()]
    assert sorted(names["decayed"] + names["kept"]) == sorted(every)  # type: ignore[operator]
    matrices = {name for name, p in model.named_parameters() if p.ndim == 2 and not name.startswith("embedding")}
    assert matrices
    assert set(names["decayed"]) == matrices  # type: ignore[call-overload]
    assert any("norm" in name for name in names["kept"])  # type: ignore[attr-defined]


def test_frozen_parameters_are_left_out() -> None:
    model = tangolm.build_model(tangolm.preset("tango-mini-d4", **SMALL))
    model.norm.weight.requires_grad_(False)
    decayed, kept = parameter_groups(model, 0.1)
    assert "norm.weight" not in decayed["names"] + kept["names"]  # type: ignore[operator]


@pytest.mark.case(18)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_are_refused_by_name(dtype: torch.dtype) -> None:
    model = tangolm.build_model(tangolm.preset("tango-mini-d4", **SMALL))
    model.norm.to(dtype)
    with pytest.raises(ValueError, match=r"'norm\.weight' is (bfloat16|float16): AdamW needs float32"):
        build_optimizer(model, OptimizerConfig(peak_lr=6e-4))


@pytest.mark.case(18)
def test_bf16_autocast_moves_norms_and_temperatures_as_float32_does() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 97, (4, 32), generator=generator)
    batch = Batch(tokens, tokens, None, torch.arange(4))
    moved = {}
    for precision in ("float32", "bf16"):
        model = tangolm.build_model(tangolm.preset("tango-mini-d4", **SMALL))
        optimizer = build_optimizer(model, OptimizerConfig(peak_lr=6e-4))
        before = {name: p.detach().clone() for name, p in model.named_parameters() if p.ndim == 1}
        for _ in range(100):
            update(
                Parallel(model),
                optimizer,
                batch,
                lr=6e-4,
                clip=1.0,
                micro_batch=4,
                place=Place(torch.device("cpu"), precision),
            )
        after = dict(model.named_parameters())
        assert all(p.dtype == torch.float32 for p in after.values())
        moved[precision] = {name: after[name].detach() - start for name, start in before.items()}
    assert any("log_temperature" in name for name in moved["bf16"])
    for name, reference in moved["float32"].items():
        # In bfloat16 storage a step of 6e-4 from 1 rounds to nothing: the displacement would be 0.
        assert reference.norm() > 1e-3, name
        assert (moved["bf16"][name] - reference).norm() < 0.35 * reference.norm(), name

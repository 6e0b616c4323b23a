"""The properties that make the block Windowed TANGO. The contracts of all models are in test_contracts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from tangolm.config import ConfigError, from_dict, to_dict
from tangolm.models import LanguageModel, WindowedTangoConfig, build_model, load_model, preset, save_model
from tangolm.models.layers import Application, unit
from tangolm.ops import window as windowed_ops
from tests.models.test_tango import layout
from tests.models.tiny import assert_equal, build, livelier, tiny, tokens

W = 8
implementations = pytest.mark.parametrize("impl", ["auto", "reference"])
FEATURES = ["random", "exponential", "none"]


def windowed(impl: str = "auto", seed: int = 0, **overrides: object) -> LanguageModel:
    return livelier(build("windowed-tango", impl, seed, **overrides))


def steps(model: LanguageModel, ids: torch.Tensor, first: int = 1) -> torch.Tensor:
    """Logits of a prompt of `first` tokens and then of one token at a time."""
    cache = model.new_cache(ids.shape[0])
    with torch.no_grad():
        out = [model(ids[:, :first], cache=cache).logits]
        out += [model(ids[:, t : t + 1], cache=cache).logits for t in range(first, ids.shape[1])]
    return torch.cat(out, 1)


@implementations
@pytest.mark.parametrize("features", FEATURES)
def test_block_equals_the_equations(impl: str, features: str) -> None:
    block = windowed(impl, features=features).double().blocks[0]
    h = torch.randn(2, 29, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    where = layout(29)
    with torch.no_grad():
        x, own = block.norm(h), block.sets[0]
        query, key = (where.rope(unit(matrix(x).unflatten(-1, (2, 32)))) for matrix in (block.query, block.key))
        gate = F.silu(own.gate(x)).unflatten(-1, (2, 24))
        mean = windowed_ops.definition(query, key, gate, block.temperature, block.directions, W)
        assert_equal(block(h, where, Application(0)), own.output(mean.flatten(2) * own.projection(x)), 1e-10)


@implementations
@pytest.mark.case(9)
def test_reach_of_a_window_without_sums(impl: str) -> None:
    """Window 8, depth 1: output i does not depend on token i - 8, and does on token i - 7; in full and in steps."""
    model, ids = windowed(impl, features="none", depth=1), tokens(1, 30)
    i = 20
    for run in (lambda x: model(x).logits.detach(), lambda x: steps(model, x)):
        before = run(ids)
        for j, seen in ((i - 8, False), (i - 7, True)):
            changed = ids.clone()
            changed[:, j] = (changed[:, j] + 1) % 97
            assert torch.equal(run(changed)[:, i], before[:, i]) is not seen


@pytest.mark.parametrize("features", ["random", "exponential"])
def test_sums_reach_beyond_the_window(features: str) -> None:
    model, ids = windowed(features=features, depth=1, initial_temperature=1.0), tokens(1, 40)
    changed = ids.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 97
    for run in (lambda x: model(x).logits.detach(), lambda x: steps(model, x)):
        moved = (run(ids) - run(changed)).abs().amax((0, 2))
        assert (moved[:3] == 0).all()
        assert (moved[3:] > 0).all()


@implementations
@pytest.mark.case(10)
@pytest.mark.parametrize("features", FEATURES)
def test_a_window_of_all_tokens_is_tango(impl: str, features: str) -> None:
    """Window == T and T + 5, the same weights: equal, token by token too."""
    ids = tokens(2, 19)
    tango = livelier(build("tango", impl))
    for window in (19, 24):
        model = windowed(impl, window=window, features=features)
        for name, parameter in tango.named_parameters():
            assert torch.equal(parameter, model.get_parameter(name)), "the directions are drawn behind the weights"
        with torch.no_grad():
            expected = tango(ids).logits
            assert torch.equal(model(ids).logits, expected)
        assert_equal(steps(model, ids), expected)


@pytest.mark.case(11)
@pytest.mark.parametrize("features", FEATURES)
def test_generation_has_a_state_of_constant_size(features: str) -> None:
    """A prompt of 6, then 5 tokens, then 100 more: each step equals full, and the bytes do not grow."""
    model, ids = windowed(features=features), tokens(2, 111)
    with torch.no_grad():
        full = model(ids).logits
    assert_equal(steps(model, ids, first=6), full, 2e-5)
    cache, held = model.new_cache(2), []
    with torch.no_grad():
        model(ids[:, :6], cache=cache)
        for t in range(6, 40):
            model(ids[:, t : t + 1], cache=cache)
            held.append(cache.bytes)
    assert len(set(held)) == 1


@pytest.mark.slow
@pytest.mark.case(11)
def test_ten_thousand_steps() -> None:
    """The last thousand of 10,011 steps equal the full pass as closely as the first thousand."""
    model, ids = windowed(initial_temperature=2.0), tokens(1, 10_011)
    with torch.no_grad():
        full = model.double()(ids).logits
        stepped = steps(model.float(), ids, first=6)
    error = (stepped.double() - full).abs().amax((0, 2)) / full.abs().max()
    assert error.max() < 1e-4
    assert error[-1000:].mean() < 3 * error[:1000].mean()


def test_directions_follow_the_model_seed(tmp_path) -> None:
    first, again, other = (build("windowed-tango", seed=seed).blocks[0].directions for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (2, 32, 32)
    model = build("windowed-tango", seed=2)
    save_model(model, tmp_path)
    assert torch.equal(load_model(tmp_path).blocks[0].directions, other)
    assert not any("directions" in name for name, _ in model.named_parameters()), "directions are not learned"
    untied = build("windowed-tango", looped=False)
    assert not torch.equal(untied.blocks[0].directions, untied.blocks[1].directions)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"feature_count": 33}, "feature_count must be even"),
        ({"feature_count": 0}, "feature_count must be even"),
        ({"features": "exponential", "feature_count": 32}, r"feature_count must be 2 head_width = 64 .* got 32"),
        ({"features": "exponential", "head_width": 16}, r"feature_count must be 2 head_width = 32 .* got 64"),
    ],
)
def test_refused_values(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny("windowed-tango", **fields)


def test_unknown_features_are_refused_by_name() -> None:
    data = to_dict(tiny("windowed-tango")) | {"features": "relu"}
    with pytest.raises(ConfigError, match="features"):
        from_dict(WindowedTangoConfig, data)


def test_counts() -> None:
    """The formula at the paper's size, and the useful products counted pair by pair."""
    config = preset("windowed-tango-70m-d4", context=8192)
    d, gated, w, m, t = 512, 28_480, 64, 64, 8192
    block = 3 * d * gated + 2 * d * d + 2 * w * (d + gated) + 2 * m * gated
    assert config.macs()["macs"] == 4 * t * block + t * d * 50_257
    assert round(config.macs()["macs"] / 1e12, 2) == 1.90
    assert config.parameters() == preset("tango-70m-d4", context=8192).parameters()
    small = tiny("windowed-tango")
    d, gated, m = small.width, small.gated_width, small.feature_count
    for t in (1, W - 1, W, W + 1, 2 * W, 37):
        near = sum(min(i + 1, W) for i in range(t))
        left, readers = sum(j + W < t for j in range(t)), sum(i >= W for i in range(t))
        useful = t * (3 * d * gated + 2 * d * d) + near * (d + gated) + (left + readers) * m * gated
        assert small.macs(t)["useful_macs"] == 2 * useful + t * d * 97
        assert small.macs(t)["useful_macs"] <= small.macs(t)["macs"]
        plain = dataclasses.replace(small, features="none").macs(t)
        assert plain["useful_macs"] == small.macs(t)["useful_macs"] - 2 * (left + readers) * m * gated
    assert small.macs(W) == tiny("tango").macs(W)


@pytest.mark.parametrize("overrides", [{"sets": 2}, {"segments": 3}, {"looped": False}])
def test_sets_segments_and_untied_blocks(overrides: dict) -> None:
    """What TANGO has, its subclass has: steps equal full, and learn."""
    model, ids = windowed(**overrides), tokens(2, 30)
    out = model(ids, labels=ids, return_logits=True)
    assert_equal(steps(model, ids), out.logits.detach())
    out.loss.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.case(17)
@pytest.mark.parametrize("temperature", [1e-6, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extreme_temperatures(temperature: float, dtype: torch.dtype) -> None:
    """Far weights finite, gradients too, in narrow parameters as well."""
    model, ids = windowed(initial_temperature=temperature).to(dtype), tokens(2, 50)
    out = model(ids, labels=ids, return_logits=True)
    out.loss.backward()
    assert out.logits.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_presets() -> None:
    for tier, window in (("mini", 16), ("70m", 64), ("160m", 64), ("410m", 64)):
        for depth in (4, 8, 16):
            config = preset(f"windowed-tango-{tier}-d{depth}")
            assert isinstance(config, WindowedTangoConfig)
            assert (config.window, config.feature_count, config.features) == (window, 64, "random")
            assert config.gated_width == preset(f"tango-{tier}-d{depth}").gated_width


def test_memory_estimate_has_no_square() -> None:
    from tangolm.models import training_memory_bytes

    configs = [tiny("windowed-tango", context=context, gated_width=512) for context in (512, 1024)]
    # Weights, their optimizer and the embedding's gradient, which the head keeps, do not grow with the context.
    fixed = [16 * config.parameters()["total"] + 4 * config.vocab_size * config.width for config in configs]
    short, long = (training_memory_bytes(config) - held for config, held in zip(configs, fixed, strict=True))
    assert 1.9 < long / short < 2.1


def test_learns_the_temperature_of_far_sources() -> None:
    """The gradient of tau through features equals that of differences."""
    model = windowed(initial_temperature=1.5).double()
    ids, tau = tokens(1, 30), model.blocks[0].log_temperature
    model(ids, labels=ids).loss.backward()
    with torch.no_grad():
        losses = []
        for shift in (1e-5, -2e-5):
            tau += shift
            losses.append(model(ids, labels=ids).loss)
    assert_equal(tau.grad.sum(), (losses[0] - losses[1]) / 2e-5, 1e-5)


def test_built_from_a_dictionary() -> None:
    config = tiny("windowed-tango", features="exponential")
    assert from_dict(WindowedTangoConfig, to_dict(config)) == config
    assert isinstance(build_model(config).blocks[0].directions, torch.Tensor)

"""Rotating narrow width: which weights enter, and that nothing else does."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tangolm.models import build_model, preset
from tangolm.models.layers import Application
from tangolm.models.rotating import Segments
from tests.models.tiny import assert_equal, livelier, tiny, tokens

ROTATING = ("rotating-tango", "rotating-loop", "rotating-untied")


def gated_matrices(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The matrices that lead into the gated width, [F, d]."""
    gated = model.config.gated_width
    return {name: parameter for name, parameter in model.named_parameters() if parameter.shape == (gated, 64)}


@pytest.mark.parametrize("family", ROTATING)
@pytest.mark.parametrize("offset", [0, 3])
def test_only_active_segments_get_gradient(family: str, offset: int) -> None:
    config = tiny(family, gated_width=60, depth=2)
    model = livelier(build_model(config, seed=0))
    model.rotate(offset)
    ids = tokens(1, 9)
    model(ids, labels=ids).loss.backward()
    segments = config.segmented
    for name, parameter in gated_matrices(model).items():
        touched = parameter.grad.abs().sum(1).reshape(segments.heads, segments.channels) > 0
        applications = [0, 1] if config.looped else [int(name.split(".")[2])]
        expected = torch.zeros(segments.channels, dtype=torch.bool)
        for n in applications:
            start = (n + offset) % 5 * segments.size
            expected[start : start + segments.size] = True
        assert torch.equal(touched, expected.expand_as(touched)), name


@pytest.mark.parametrize("family", ROTATING)
def test_one_segment_equals_dense(family: str) -> None:
    config = tiny(family)
    dense = build_model(dataclasses.replace(config, segments=1), seed=0)
    rotating = build_model(config, seed=0)
    ids = tokens(2, 17)
    with torch.no_grad():
        expected = dense(ids).logits
        rotating.rotate(None)
        assert torch.equal(rotating(ids).logits, expected)
        rotating.rotate(0)
        assert not torch.allclose(rotating(ids).logits, expected)
    with pytest.raises(ValueError, match="no segments"):
        dense.rotate(1)


@pytest.mark.parametrize("family", ROTATING)
def test_a_specialist_with_the_segments_weights(family: str) -> None:
    """With one application, a rotating model computes what a narrow model with its active weights computes."""
    config = tiny(family, depth=1, gated_width=40)
    rotating = livelier(build_model(config, seed=0))
    rotating.rotate(2)
    segments = config.segmented
    narrow = build_model(dataclasses.replace(config, segments=1, gated_width=segments.active_width))
    state = rotating.state_dict()
    for name, tensor in narrow.state_dict().items():
        if tensor.shape != state[name].shape:
            into = tensor.shape[0] == segments.active_width
            state[name] = (segments.rows if into else segments.columns)(state[name], 2)
    narrow.load_state_dict(state)
    ids = tokens(2, 17)
    with torch.no_grad():
        assert_equal(rotating(ids).logits, narrow(ids).logits)


def test_every_segment_in_turn() -> None:
    segments = Segments(5, heads=2, channels=12, multiple=16)
    assert (segments.size, segments.packed, segments.active_width) == (3, 16, 32)
    assert [segments.active(Application(n, 2)) for n in range(6)] == [2, 3, 4, 0, 1, 2]
    assert segments.active(Application(0, None)) is None
    weight = torch.arange(24 * 3, dtype=torch.float32).reshape(24, 3)
    parts = [segments.rows(weight, s).unflatten(0, (2, 16)) for s in range(5)]
    whole = torch.cat([part[:, :3] for part in parts], 1)[:, :12]
    assert torch.equal(whole.flatten(0, 1), weight)
    assert all((part[:, 3:] == 0).all() for part in parts)
    columns = [segments.columns(weight.T, s) for s in range(5)]
    assert all(torch.equal(c, part.flatten(0, 1).T) for c, part in zip(columns, parts, strict=True))


def test_a_step_costs_a_fifth() -> None:
    for family in ("tango", "loop"):
        dense, rotating = preset(f"{family}-70m-d8"), preset(f"rotating-{family}-70m-d8")
        head = dense.context * dense.width * dense.vocab_size
        share = (rotating.macs()["macs"] - head) / (dense.macs()["macs"] - head)
        assert share < 0.35

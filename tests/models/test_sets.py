"""Several sets of gated projections, and the compact controller."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from tangolm.models import TangoConfig, build_model, preset
from tests.models.tiny import assert_equal, build, livelier, tiny, tokens


def test_schedule_of_three_sets() -> None:
    assert preset("tango-3-sets-70m-d8").schedule == (0, 1, 1, 1, 1, 1, 1, 2)
    assert preset("tango-3-sets-70m-d4").schedule == (0, 1, 1, 2)
    assert tiny("tango", depth=1).schedule == (0,)
    assert tiny("tango", depth=6, sets=5).schedule == (0, 1, 1, 2, 3, 4)
    assert tiny("tango", depth=3, sets=2).schedule == (0, 1, 1)
    assert tiny("tango", depth=3, sets=2, set_schedule=(1, 0, 0)).schedule == (1, 0, 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sets": 0}, "sets must be at least 1"),
        ({"sets": 3, "depth": 2}, "must use each of 3 sets"),
        ({"sets": 2, "set_schedule": (0, 0)}, "must use each of 2 sets"),
        ({"sets": 2, "set_schedule": (0, 1, 0)}, "must have depth = 2 items, got 3"),
        ({"sets": 2, "looped": False}, "looped is false"),
    ],
)
def test_refused_schedules(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny("tango", **fields)


def test_equal_sets_equal_one_set() -> None:
    one = livelier(build("tango", depth=4))
    three = build_model(dataclasses.replace(one.config, sets=3), seed=1)
    state = one.state_dict()
    three.load_state_dict(
        {
            name: state[name.replace(".sets.1.", ".sets.0.").replace(".sets.2.", ".sets.0.")]
            for name in three.state_dict()
        }
    )
    ids = tokens(2, 17)
    with torch.no_grad():
        assert torch.equal(three(ids).logits, one(ids).logits)


def test_each_application_reads_its_set() -> None:
    model = livelier(build("tango", depth=4, sets=3))
    ids = tokens(1, 9)
    with torch.no_grad():
        base = model(ids).logits
        for k in range(3):
            weight = model.blocks[0].sets[k].gate.weight
            kept = weight.clone()
            weight.zero_()
            assert not torch.allclose(model(ids).logits, base), f"set {k} is never read"
            weight.copy_(kept)


def test_sets_count() -> None:
    config = TangoConfig(vocab_size=97, context=8, depth=3, width=64, gated_width=48, sets=3)
    assert config.parameters()["non_embedding"] == 3 * 3 * 64 * 48 + 2 * 64 * 64 + 2 * 64 + 2


def test_compact_equals_the_equation() -> None:
    """At r = E with an identity expansion the controller is the gate, so the block is TANGO's."""
    compact = livelier(build("compact-tango", controller_width=24)).double()
    tango = livelier(build("tango")).double()
    block, own = compact.blocks[0], tango.blocks[0]
    with torch.no_grad():
        for name in ("query", "key"):
            getattr(own, name).weight.copy_(getattr(block, name).weight)
        own.sets[0].gate.weight.copy_(block.controller.weight)
        own.sets[0].projection.weight.copy_(block.projection.weight)
        own.sets[0].output.weight.copy_(block.output.weight)
        tango.embedding.weight.copy_(compact.embedding.weight)
        block.expansion.copy_(torch.eye(24).expand(2, 24, 24))
        ids = tokens(2, 13)
        assert_equal(compact(ids).logits, tango(ids).logits, 1e-10)


def test_compact_with_one_token() -> None:
    block = livelier(build("compact-tango")).blocks[0]
    model = livelier(build("compact-tango", depth=1))
    block = model.blocks[0]
    with torch.no_grad():
        h = model.embedding(tokens(1, 1))
        x = block.norm(h)
        c = F.silu(block.controller(x)).unflatten(-1, (2, 32))
        gate = torch.stack([c[0, 0, head] @ block.expansion[head] for head in range(2)]).flatten()
        expected = h + block.output(gate * block.projection(x))
        assert_equal(model.logits(model.norm(expected)), model(tokens(1, 1)).logits)


def test_compact_count_and_cache() -> None:
    config = preset("compact-tango-70m-d4")
    d, gated, heads = config.width, config.gated_width, config.heads
    assert config.parameters()["non_embedding"] == 2 * d * gated + 32 * gated + 3 * d * d + 2 * d + heads
    caches = {}
    for family in ("compact-tango", "tango"):
        model = build(family, gated_width=512)
        caches[family] = model.new_cache(1)
        with torch.no_grad():
            model(tokens(1, 16), cache=caches[family])
    assert caches["compact-tango"].bytes == 2 * 16 * 4 * (64 + 64)
    assert caches["tango"].bytes == 2 * 16 * 4 * (64 + 512)
    with pytest.raises(ValueError, match="segments must be 1"):
        tiny("compact-tango", segments=5)

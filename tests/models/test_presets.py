"""The width rule and the presets' names."""

from __future__ import annotations

import pytest

from tangolm.models import preset, preset_names
from tangolm.models.presets import CONVENTIONAL, FAMILIES, TIERS, fit_width


def test_every_name_builds_and_meets_its_target() -> None:
    names = preset_names()
    assert len(names) == len(set(names)) == 3 * len(TIERS) * len(FAMILIES) + len(CONVENTIONAL)
    for name in names:
        config = preset(name)
        tier = TIERS[name.split("-")[-2]]
        if name.startswith(("conventional", "specialist")):
            continue  # the paper's own geometry, and the packed width: tested by name here and in test_paper
        error = abs(config.parameters()["non_embedding"] / tier.target - 1)
        assert error < 0.006, f"{name} misses its target by {error:.2%}"


@pytest.mark.parametrize("name", ["tango-mini-d4", "loop-70m-d8", "untied-160m-d16", "untied-mini-d8"])
def test_no_neighbour_is_nearer(name: str) -> None:
    import dataclasses

    config = preset(name)
    family, tier_name, _ = name.split("-")
    tier = TIERS[tier_name]
    step = tier.coarse if family == "untied" else config.heads
    assert config.gated_width % step == 0

    def miss(width: int) -> int:
        return abs(dataclasses.replace(config, gated_width=width).parameters()["non_embedding"] - tier.target)

    assert miss(config.gated_width) <= min(miss(config.gated_width - step), miss(config.gated_width + step))


def test_known_mini_widths() -> None:
    assert preset("tango-mini-d4").gated_width == 2048
    assert preset("tango-mini-d4").parameters()["non_embedding"] == 401_538
    assert preset("untied-mini-d8").gated_width == 176


def test_known_widths_of_variants() -> None:
    assert preset("compact-tango-70m-d4").gated_width == 41_168
    assert preset("specialist-tango-70m-d8").gated_width == 368 * 16
    assert preset("specialist-loop-70m-d8").gated_width == 5632
    assert preset("specialist-untied-70m-d8").gated_width == 640
    for family in ("tango", "loop", "untied"):
        dense, rotating = preset(f"{family}-70m-d8"), preset(f"rotating-{family}-70m-d8")
        assert dense.parameters() == rotating.parameters()
        assert rotating.macs() == preset(f"specialist-{family}-70m-d8").macs()


def test_a_target_below_one_step_takes_one_step() -> None:
    config = fit_width(lambda width: preset("tango-mini-d4", gated_width=width), target=1, step=2)
    assert config.gated_width == 2


def test_data_brings_vocabulary_and_context() -> None:
    config = preset("tango-70m-d4")
    assert (config.vocab_size, config.context) == (50_257, 8192)
    mini = preset("loop-mini-d4")
    assert (mini.vocab_size, mini.context) == (257, 256)
    own = preset("tango-70m-d4", vocab_size=257, context=256, initial_temperature=3.0)
    assert (own.vocab_size, own.context, own.initial_temperature) == (257, 256, 3.0)
    assert own.gated_width == config.gated_width, "the width does not follow the data's vocabulary"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tango-70m-d5", "did you mean"),
        ("tnago-70m-d4", "did you mean 'tango-70m-d4'"),
        ("conventional-mini-d4", "no conventional geometry"),
        ("conventional-410m-d8", "no conventional geometry"),
        ("", "tangolm presets"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset(name)


def test_unknown_field() -> None:
    with pytest.raises(ValueError, match="no field 'gated_widht'; did you mean 'gated_width'"):
        preset("tango-mini-d4", gated_widht=3)
    with pytest.raises(ValueError, match="no field 'initial_temperature'"):
        preset("loop-mini-d4", initial_temperature=3.0)

"""Presets by name: `{family}-{tier}-d{depth}`, each as wide as the width rule makes it.

The width rule: the target is the tier's total at d and the GPT-2 vocabulary (the mini tier: the non-embedding count of its
TANGO); F is the multiple of the family's step that comes nearest. It gives every width of the paper's Table 3 but one
(`GAU_AS_PRINTED`). GAU's bias grows with the context, so its width depends on it. Conventional: the geometry of the paper's
Table 6, as printed there.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable
from typing import Any

from tangolm.config import suggest
from tangolm.models.base import ModelConfig
from tangolm.models.compact import CompactTangoConfig
from tangolm.models.flash import FlashConfig
from tangolm.models.gau import GauConfig
from tangolm.models.tango import AveragingConfig, TangoConfig
from tangolm.models.transformer import TransformerConfig
from tangolm.models.windowed import WindowedTangoConfig

GPT2_VOCABULARY = 50_257
DEPTHS = (4, 8, 16)
SEGMENTS = 5  # of the rotating models


@dataclasses.dataclass(frozen=True)
class Tier:
    """Model width d, non-embedding target, and the vocabulary and context of a preset that is given none.

    `coarse` is the width step of the families that do not step by heads; `flash_group` and `window` the tokens of FLASH's
    groups and of Windowed TANGO's window.
    """

    width: int
    target: int
    coarse: int
    flash_group: int = 256
    window: int = 64
    vocab_size: int = GPT2_VOCABULARY
    context: int = 8192


def _target(total: int, width: int) -> int:
    return total - GPT2_VOCABULARY * width


TIERS = {
    "mini": Tier(64, 401_538, coarse=4, flash_group=64, window=16, vocab_size=257, context=256),
    "70m": Tier(512, _target(70_000_000, 512), coarse=16),
    "160m": Tier(768, _target(160_000_000, 768), coarse=16),
    "410m": Tier(1024, _target(410_000_000, 1024), coarse=16),
}

# Paper Table 6: (tier, depth) -> d, F.
CONVENTIONAL = {
    ("70m", 4): (800, 2064),
    ("70m", 8): (640, 1616),
    ("70m", 16): (480, 1344),
    ("160m", 4): (1376, 3664),
    ("160m", 8): (1056, 2816),
    ("160m", 16): (800, 2080),
}

# Paper Table 3: the one width that the rule does not give (13,120 is nearer): (d, depth, context) -> e.
GAU_AS_PRINTED = {(768, 4, 2048): 13_104}


def fit_width(make: Callable[[int], ModelConfig], target: int, step: int) -> ModelConfig:
    """The configuration `make(F)` whose non-embedding count is nearest `target`, F a multiple of `step`.

    Counts are linear in F, so two of them give the line.
    """
    one, two = (make(k * step).parameters()["non_embedding"] for k in (1, 2))
    steps = 1 + (target - one) / (two - one)
    near = [make(max(1, k) * step) for k in (int(steps), int(steps) + 1)]
    return min(near, key=lambda config: abs(config.parameters()["non_embedding"] - target))


def _tango(tier: Tier, kind: type[AveragingConfig] = TangoConfig, **fields: Any) -> ModelConfig:
    def make(gated_width: int) -> AveragingConfig:
        return kind(width=tier.width, gated_width=gated_width, **fields)  # type: ignore[call-arg]

    return fit_width(make, tier.target, make(tier.width).heads)


def _transformer(tier: Tier, *, looped: bool, **fields: Any) -> ModelConfig:
    def make(gated_width: int) -> TransformerConfig:
        return TransformerConfig(width=tier.width, gated_width=gated_width, looped=looped, **fields)

    return fit_width(make, tier.target, make(1).heads if looped else tier.coarse)


def _gau(tier: Tier, **fields: Any) -> ModelConfig:
    def make(gated_width: int) -> GauConfig:
        return GauConfig(width=tier.width, gated_width=gated_width, **fields)

    printed = GAU_AS_PRINTED.get((tier.width, fields["depth"], fields["context"]))
    return fit_width(make, tier.target, tier.coarse) if printed is None else make(printed)


def _flash(tier: Tier, **fields: Any) -> ModelConfig:
    def make(gated_width: int) -> FlashConfig:
        return FlashConfig(width=tier.width, gated_width=gated_width, group=tier.flash_group, **fields)

    return fit_width(make, tier.target, tier.coarse)


def _rotating(family: str) -> Callable[..., ModelConfig]:
    return lambda tier, **fields: dataclasses.replace(FAMILIES[family](tier, **fields), segments=SEGMENTS)


def _specialist(family: str) -> Callable[..., ModelConfig]:
    """The model that is as wide as the active segment of the rotating one."""

    def build(tier: Tier, **fields: Any) -> ModelConfig:
        rotating = _rotating(family)(tier, **fields)
        assert isinstance(rotating, TangoConfig | TransformerConfig)
        return dataclasses.replace(rotating, segments=1, gated_width=rotating.segmented.active_width)

    return build


# Adding a family is a line here; each takes the tier and the common fields.
FAMILIES: dict[str, Callable[..., ModelConfig]] = {
    "tango": _tango,
    "windowed-tango": lambda tier, **fields: _tango(tier, WindowedTangoConfig, window=tier.window, **fields),
    "tango-3-sets": lambda tier, **fields: _tango(tier, sets=3, **fields),
    "compact-tango": lambda tier, **fields: _tango(tier, CompactTangoConfig, **fields),
    "loop": lambda tier, **fields: _transformer(tier, looped=True, **fields),
    "untied": lambda tier, **fields: _transformer(tier, looped=False, **fields),
    "gau": _gau,
    "flash": _flash,
    "rotating-tango": _rotating("tango"),
    "rotating-windowed-tango": _rotating("windowed-tango"),
    "rotating-loop": _rotating("loop"),
    "rotating-untied": _rotating("untied"),
    "specialist-tango": _specialist("tango"),
    "specialist-windowed-tango": _specialist("windowed-tango"),
    "specialist-loop": _specialist("loop"),
    "specialist-untied": _specialist("untied"),
}


def preset_names() -> list[str]:
    """Every preset, families in order, tiers and depths inside."""
    names = [f"{family}-{tier}-d{depth}" for family in FAMILIES for tier in TIERS for depth in DEPTHS]
    return names + [f"conventional-{tier}-d{depth}" for tier, depth in CONVENTIONAL]


def tier_of(width: int) -> str:
    """The tier whose TANGO width is nearest, for defaults that go by size."""
    return min(TIERS, key=lambda name: abs(TIERS[name].width - width))


def preset(name: str, *, vocab_size: int | None = None, context: int | None = None, **overrides: Any) -> ModelConfig:
    """The configuration of a preset; the data's vocabulary and context, and any field, override it.

    Args:
        name: such as "tango-70m-d4"; `preset_names()` lists all.
        vocab_size, context: None: GPT-2's 50,257 and 8,192 (mini tier: 257 and 256).
        overrides: fields of the architecture's configuration.

    Raises:
        ValueError: an unknown name, an unknown field, a value that the architecture refuses.
    """
    match = re.fullmatch(r"(.+)-([^-]+)-d(\d+)", name)
    if name not in preset_names() or match is None:
        if name.startswith("conventional-") and match and match[2] in TIERS:
            raise ValueError(
                f"preset {name!r}: the paper gives no conventional geometry there{suggest(name, preset_names())}"
            )
        near = difflib.get_close_matches(name, preset_names(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"preset {name!r} is not known; {hint}`tangolm presets` lists all")
    family, tier_name, depth = match[1], match[2], int(match[3])
    tier = TIERS[tier_name]
    fields: dict[str, Any] = {
        "vocab_size": tier.vocab_size if vocab_size is None else vocab_size,
        "context": tier.context if context is None else context,
        "depth": depth,
    }
    if family == "conventional":
        width, gated_width = CONVENTIONAL[tier_name, depth]
        config: ModelConfig = TransformerConfig(width=width, gated_width=gated_width, looped=False, **fields)
    else:
        config = FAMILIES[family](tier, **fields)
    known = {field.name for field in dataclasses.fields(config)} - {"architecture"}
    for key in overrides:
        if key not in known:
            raise ValueError(f"preset {name!r} has no field {key!r}{suggest(key, known)}")
    return dataclasses.replace(config, **overrides)

"""What of a corpus is held out: a hash of a name decides its split, two fractions how large development and test are."""

from __future__ import annotations

import hashlib


def check_fractions(dev_fraction: float, test_fraction: float) -> None:
    """Refuse fractions that are not above 0 and below a half.

    Raises:
        ValueError: names the option and its value.
    """
    for name, value in (("dev_fraction", dev_fraction), ("test_fraction", test_fraction)):
        if not 0 < value < 0.5:
            raise ValueError(f"{name} must be above 0 and below 0.5, got {value}")


def place_of(name: bytes) -> float:
    """Where a hash puts a name between 0 and 1."""
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") / 2**64


def split_at(place: float, dev_fraction: float, test_fraction: float) -> str:
    """The split of a place: the test comes first, then development, then training."""
    if place < test_fraction:
        return "test"
    return "dev" if place < test_fraction + dev_fraction else "train"


def token_limits(tokens: int | None, dev_fraction: float, test_fraction: float) -> dict[str, int]:
    """Tokens at which each split ends: `tokens` of training, their share of the others; no limits where None."""
    if tokens is None:
        return {}
    train = 1 - dev_fraction - test_fraction
    share = {"dev": dev_fraction, "test": test_fraction}
    return {"train": tokens, **{split: max(1, round(tokens * share[split] / train)) for split in share}}

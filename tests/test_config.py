"""Configurations to JSON and back, overrides, fingerprints."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangolm.config import ConfigError, fingerprint, from_dict, override, to_dict


@dataclass(frozen=True)
class Inner:
    rate: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"rate must not be negative, got {self.rate}")


@dataclass(frozen=True)
class Outer:
    steps: int
    kind: Literal["a", "b"] = "a"
    limit: int | None = None
    on: bool = False
    weights: dict[str, float] = field(default_factory=dict)
    inner: Inner = Inner()


outers = st.builds(
    Outer,
    steps=st.integers(),
    kind=st.sampled_from(["a", "b"]),
    limit=st.none() | st.integers(),
    on=st.booleans(),
    weights=st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    inner=st.builds(
        Inner,
        rate=st.floats(min_value=0, allow_infinity=False),
        betas=st.tuples(st.floats(0, 1), st.floats(0, 1)),
        names=st.lists(st.text(), max_size=3).map(tuple),
    ),
)


@given(outers)
def test_round_trip(config: Outer) -> None:
    again = from_dict(Outer, json.loads(json.dumps(to_dict(config))))
    assert again == config
    assert fingerprint(again) == fingerprint(config)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "missing key 'steps'"),
        ({"steps": 1, "stepz": 2}, "unknown key 'stepz'; did you mean 'steps'"),
        ({"steps": 1.5}, "steps must be int, got 1.5"),
        ({"steps": True}, "steps must be int, got True"),
        ({"steps": 1, "on": 1}, "on must be bool"),
        ({"steps": 1, "kind": "c"}, "kind must be one of 'a', 'b', got 'c'"),
        ({"steps": 1, "limit": "x"}, "limit must be int"),
        ({"steps": 1, "inner": {"rate": float("nan")}}, "inner.rate must be finite"),
        ({"steps": 1, "inner": {"rate": -1.0}}, "inner: rate must not be negative"),
        ({"steps": 1, "inner": {"betas": [0.9]}}, "inner.betas must have 2 items"),
        ({"steps": 1, "inner": {"betas": 0.9}}, "inner.betas must be a list"),
        ({"steps": 1, "inner": {"names": ["a", 1]}}, r"inner.names\[1\] must be str"),
        ({"steps": 1, "inner": 3}, "inner must be a mapping"),
        ({"steps": 1, "weights": {"x": "y"}}, "weights.x must be float"),
    ],
)
def test_refused_by_name(data: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_dict(Outer, data)


def test_overrides() -> None:
    config = override(
        Outer(1), ["steps=5", "inner.rate=3e-4", "kind=b", "inner.betas=[0.8, 0.9]", "limit=null", "on=true"]
    )
    assert config == Outer(5, "b", None, True, {}, Inner(3e-4, (0.8, 0.9)))


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("steps", "has no '='"),
        ("inner.rat=1", "unknown key 'inner.rat'; did you mean 'rate'"),
        ("iner.rate=1", "did you mean 'inner'"),
        ("steps.x=1", "unknown key 'steps.x'"),
        ("steps=many", "steps must be int, got 'many'"),
    ],
)
def test_bad_overrides(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        override(Outer(1), [assignment])


def test_fingerprint_is_stable_and_sensitive() -> None:
    assert fingerprint(Outer(1)) == "50b0366b826d"
    assert fingerprint(Outer(1)) != fingerprint(Outer(2))
    assert fingerprint(Outer(1)) != fingerprint(Outer(1, inner=Inner(2.0)))

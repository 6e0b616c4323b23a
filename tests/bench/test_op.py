"""The benchmark of the gate averaging: what it prints is checked first, measured in one run, and held against bars."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Callable

import pytest
import torch

from tangolm import ops
from tangolm.bench import op
from tangolm.bench.bars import Bar, judge
from tangolm.bench.machine import Machine, extra_peak_bytes, product_rate
from tangolm.bench.op import BARS, OpResult, Options, render, run
from tangolm.ops import reference
from tangolm.ops.compare import Error
from tangolm.training.memory import peak_memory_bytes

TINY = Options(batch=2, heads=2, tokens=70, key_width=8, gate_width=16, repeats=2)
RIGHT = (Error("average", 1e-7, 1e-7, 2e-7),)
WRONG = (Error("average", 1e-3, 1e-7, 2e-7),)


def touch(megabytes: int) -> Callable[[], object]:
    """A call that holds so much memory for a moment."""
    return lambda: torch.ones(megabytes << 18)


@pytest.fixture
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "extra_peak_bytes", lambda *_: 1000)
    monkeypatch.setattr(op, "product_rate", lambda dtype: 1e9)


def result(**figures: float) -> OpResult:
    """A result at the first bar's shape."""
    return OpResult(Options(**dict(BARS[0].where)), "chunked", Machine.describe(), RIGHT, **figures)  # type: ignore[arg-type]


def test_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tangolm.bench.machine.PRODUCT", 256)  # soon done
    measured = run(TINY)
    assert measured.correct
    assert measured.impl == "chunked"
    assert all(figure is not None and figure > 0 for figure in (measured.seconds, measured.naive_seconds))
    assert measured.fraction is not None
    assert 0 < measured.fraction < 1
    plain = json.loads(json.dumps(measured.to_dict()))
    assert plain["options"]["tokens"] == 70
    assert plain["correct"] is True
    assert plain["machine"]["torch"] == torch.__version__
    assert plain["fraction"] == measured.fraction
    assert not platform.node() or platform.node() not in json.dumps(plain)
    assert "times faster" in "\n".join(render(measured))


@pytest.mark.parametrize("dtype", list(op.DTYPES))
def test_naive_is_the_reference(dtype: str) -> None:
    """The form that ours is compared with computes the same."""
    options = dataclasses.replace(TINY, dtype=dtype)
    query, key, gate, temperature, _ = op.inputs(options, head_major=True)
    hidden = torch.ones(70, 70, dtype=torch.bool).triu(1)
    naive = op.naive_average(query, key, gate, temperature.to(gate.dtype), hidden).transpose(1, 2)
    exact = (x.transpose(1, 2).double() for x in (query, key, gate))
    expected = reference.aggregate_gates(*exact, temperature.double(), None, None)
    assert (naive - expected).abs().max() < (1e-5 if dtype == "float32" else 0.1)


@pytest.mark.usefixtures("without_processes")
def test_a_wrong_result_prints_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ops.IMPLS, "chunked", lambda *args: reference.aggregate_gates(*args) * 1.01)
    monkeypatch.setattr(op, "seconds", lambda call: pytest.fail("a wrong result was timed"))
    measured = run(TINY)
    assert not measured.correct
    assert measured.seconds is measured.speedup is measured.extra_bytes is measured.fraction is None
    text = "\n".join(render(measured))
    assert "WRONG: average" in text
    assert "faster" not in text


@pytest.mark.usefixtures("without_processes")
def test_pairs_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Medians over the pairs, and the ratio's median, not the medians' ratio."""
    times = iter([1.0, 2.0, 10.0, 50.0, 3.0, 9.0])
    monkeypatch.setattr(op, "seconds", lambda call: next(times))
    measured = run(dataclasses.replace(TINY, repeats=3))
    assert (measured.seconds, measured.naive_seconds, measured.speedup) == (3.0, 9.0, 3.0)
    assert measured.fraction == pytest.approx(TINY.useful_operations / 3.0 / 1e9)


def test_useful_operations_are_the_causal_ones() -> None:
    options = Options(batch=2, heads=3, tokens=4, key_width=5, gate_width=6)
    pairs = sum(1 for i in range(4) for j in range(4) if j <= i)
    assert options.useful_operations == 3 * 2 * (2 * 3 * pairs * (5 + 6))


def test_bars() -> None:
    def missed(**figures: float) -> list[str]:
        measured = result(**good | figures)
        return [line for line, met in judge(BARS, measured.options, {"op": measured}) if not met]

    good = {"speedup": 2.0, "extra_bytes": 50, "naive_extra_bytes": 100, "seconds": 1.0}
    good["product_rate"] = result().options.useful_operations / 0.75
    assert missed() == []
    assert missed(speedup=1.99) == ["MISSED: naive time / ours 1.99 >= 2.0"]
    assert missed(extra_bytes=51) == ["MISSED: extra memory / naive's 0.51 <= 0.5"]
    assert missed(seconds=1.01) == ["MISSED: useful operations a second / product rate 0.743 >= 0.75"]
    verdicts = judge(BARS, result().options, {"op": result()})
    assert [met for _, met in verdicts] == [False] * 3, "what was not measured is not passed"
    with pytest.raises(ValueError, match=r"no bar is set for these models and sizes; --check knows .*'tokens': 2048"):
        judge(BARS, TINY, {"op": result()})


def test_the_first_bars_are_the_promised_ones() -> None:
    assert [(bar.what, bar.limit, bar.at_most) for bar in BARS[:3]] == [
        (op.SPEEDUP, 2.0, False),
        (op.MEMORY, 0.5, True),
        (op.FRACTION, 0.75, False),
    ]
    sizes = {"batch": 1, "heads": 16, "tokens": 2048, "key_width": 32, "gate_width": 1780, "dtype": "float32"}
    assert all(isinstance(bar, Bar) and dict(bar.where) == sizes for bar in BARS[:3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 0}, "tokens must be at least 1, got 0"),
        ({"repeats": -1}, "repeats must be at least 1, got -1"),
        ({"dtype": "float31"}, r"dtype 'float31' is not known.*float32"),
        ({"impl": "chonked"}, r"impl 'chonked' is not known.*chunked"),
    ],
)
def test_refused(change: dict[str, int | str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**change)  # type: ignore[arg-type]


@pytest.mark.skipif(peak_memory_bytes() is None, reason="the system does not tell a process its peak")
def test_peak_memory_of_a_call() -> None:
    extra = extra_peak_bytes(touch, 300)
    assert extra is not None
    assert 295 << 20 < extra < 340 << 20


def test_product_rate_is_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tangolm.bench.machine.seconds", lambda call: 0.5)
    assert product_rate(torch.float32) == 2 * 2048**3 / 0.5

"""The benchmarks of training steps, generation and the head: checked first, compared in one run, held against bars."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tangolm.bench import bars, decode, growth, head, processes, train
from tangolm.bench.bars import Bar
from tangolm.cli import main
from tangolm.models import preset


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Product rates in a moment, peak memory without processes, models of one application."""
    monkeypatch.setattr("tangolm.bench.machine.PRODUCT", 64)
    for module in (train, head, growth):
        monkeypatch.setattr(module, "extra_peak_bytes", lambda *_: 1000)
    for module in (train, decode):
        monkeypatch.setattr(
            module,
            "preset",
            lambda name, **fields: replace(preset(name, **{"vocab_size": 97, **fields}), depth=1, gated_width=64),
        )


def test_train_compares_with_the_first_model() -> None:
    names = ("loop-mini-d4", "tango-mini-d4", "tango-mini-d4:recompute", "tango-mini-d4:naive")
    result = train.run(train.Options(names, tokens=20, batch=2, repeats=2))
    rows = {row.model: row for row in result.rows}
    assert list(rows) == list(names)
    assert rows["loop-mini-d4"].relative == 1
    assert len({rows[name].macs for name in names[1:]}) == 1
    assert all(row.seconds > 0 and row.extra_bytes == 1000 for row in result.rows)
    config = preset("tango-mini-d4", vocab_size=97, context=20, depth=1, gated_width=64)
    assert rows["tango-mini-d4"].macs == 2 * config.macs()["macs"]
    text = "\n".join(train.render(result))
    assert all(f"| {name} |" in text for name in names)
    json.dumps(result.to_dict(), allow_nan=False)


def test_a_wrong_naive_form_gives_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = train.naive_average
    monkeypatch.setattr(train, "naive_average", lambda *arguments: 1.1 * right(*arguments))
    with pytest.raises(ValueError, match="gradients and those of the naive form differ"):
        train.run(train.Options(("tango-mini-d4:naive",), tokens=20, repeats=1))


def test_decode_steps_behind_the_cache() -> None:
    result = decode.run(decode.Options(("loop-mini-d4@8", "tango-mini-d4@8", "tango-mini-d4@40"), repeats=2))
    short, long = result.rows[1:]
    assert long.cache_bytes > short.cache_bytes
    assert all(row.step_seconds > 0 and row.saved is not None for row in result.rows)
    assert "| tango-mini-d4@40 |" in "\n".join(decode.render(result))


def test_a_wrong_step_gives_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode._Model, "full", lambda self: torch.ones(1, 97))
    with pytest.raises(ValueError, match="step and full forward differ"):
        decode.run(decode.Options(("tango-mini-d4@8",), repeats=1))


def test_head_errors_are_those_of_the_logits_version() -> None:
    result = head.run(head.Options(tokens=50, width=8, vocabulary=97, repeats=1))
    assert all(0 < error < 1e-5 for error in (*result.errors, *result.logits_errors))
    assert result.memory_ratio == 1
    assert "of it" in "\n".join(head.render(result))


def test_bars_judge_what_was_measured() -> None:
    known = (
        Bar("a / b", ("a", "b"), lambda a, b: a / b, 2.0, where=(("tokens", 8),)),
        Bar("a", ("a",), lambda a: a, 3.0, at_most=True),
        Bar("unknown", ("c",), lambda c: None, 1.0, at_most=True),
    )
    options = SimpleNamespace(tokens=8)
    assert [met for _, met in bars.judge(known, options, {"a": 4.0, "b": 2.0})] == [True, False]
    assert [met for _, met in bars.judge(known, SimpleNamespace(tokens=9), {"a": 3.0, "b": 2.0})] == [True]
    assert bars.judge(known, options, {"c": 1.0}) == [("MISSED: unknown n/a <= 1.0", False)]
    with pytest.raises(ValueError, match="no bar is set for these models and sizes; --check knows a,b"):
        bars.judge(known, options, {"d": 1.0})


@pytest.mark.parametrize("module", [train, decode, head])
def test_every_bar_names_models_that_exist(module: Any) -> None:
    assert module.BARS
    for bar in module.BARS:
        for row in bar.rows:
            if row != "head":
                preset(row.partition("@")[0].partition(":")[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "tango-mini-d4:fast"], "behind the colon stands one of: recompute, naive"),
        (["train", "tango-mini"], "preset 'tango-mini' is not known"),
        (["train", ","], "models is empty"),
        (["train", "tango-mini-d4", "--tokens", "0"], "tokens must be at least 1, got 0"),
        (["decode", "tango-mini-d4"], "write how many tokens are cached: tango-mini-d4@2048"),
        (["head", "--width", "0"], "width must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_model_without_a_naive_form_is_named() -> None:
    with pytest.raises(ValueError, match="loop-mini-d4 has no naive form here"):
        train.run(train.Options(("loop-mini-d4:naive",), tokens=8, repeats=1))


def test_the_command_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    assert main(["bench", "decode", "tango-mini-d4@8", "--repeats", "1", "--out", str(path)]) == 0
    assert json.loads(path.read_text())["rows"][0]["model"] == "tango-mini-d4@8"
    assert "| tango-mini-d4@8 |" in capsys.readouterr().out
    assert main(["bench", "head", "--tokens", "9", "--width", "4", "--vocabulary", "11", "--check"]) == 2


def test_growth_with_the_length(tmp_path: Path) -> None:
    for form in ("windowed", "full"):
        options = ["--lengths", "64,128", "--heads", "1", "--gate-width", "16", "--repeats", "1"]
        assert main(["bench", "growth", form, *options, "--out", str(tmp_path / f"{form}.json")]) == 0
    record = json.loads((tmp_path / "windowed.json").read_text())
    first, second = record["rows"]
    assert (first["tokens"], second["tokens"], first["time_ratio"]) == (64, 128, None)
    assert second["time_ratio"] == pytest.approx(second["seconds"] / first["seconds"])
    files = [str(tmp_path / f"{form}.json") for form in ("windowed", "full")]
    assert main(["bench", "plot", *files, "--out", str(tmp_path / "growth.svg")]) == 0
    assert "windowed, H 1, E 16" in (tmp_path / "growth.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["growth", "--lengths", "64,100"], "lengths must be at least two, each twice the one before"),
        (["growth", "--lengths", "64,x"], "--lengths must be whole numbers"),
        (["growth", "sideways"], "form must be windowed or full, got 'sideways'"),
        (["plot", "missing.json", "--out", "a.svg"], "missing.json cannot be read as a result"),
        (["plot", "missing.json", "--out", "a.txt"], "must end in .svg, .png or .pdf"),
        (["processes", "--processes", "1"], "processes must be at least 2, got 1"),
        (["processes", "--steps", "4"], "steps must be above 4, got 4"),
    ],
)
def test_what_growth_and_processes_refuse(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_wrong_averages_have_no_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    right = growth.ops.aggregate_gates
    monkeypatch.setattr(growth.ops, "aggregate_gates", lambda *a, **k: right(*a, **k) * (1 + (k["impl"] == "auto")))
    with pytest.raises(ValueError, match="differs from the reference form"):
        growth.run(growth.Options(lengths=(64, 128), heads=1, gate_width=8, repeats=1))


@pytest.mark.slow
def test_processes_train_alike() -> None:
    result = processes.run(processes.Options(batch=2, steps=5, repeats=1))
    assert result.difference < 1e-6
    assert all(rate > 0 for rate in result.tokens_per_s)
    assert bars.judge(processes.BARS, result.options, {"processes": result})[0][1]

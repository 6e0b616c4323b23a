"""The probe of a dry run: what it measures, in a process of its own, and what it says when that fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tangolm.bench import dry_run as bench
from tangolm.bench.bars import judge
from tangolm.training import RunConfig, plan, probe

Make = Callable[..., RunConfig]


def test_a_plan_with_a_probe_says_what_the_run_costs(tiny: Make, tmp_path: Path) -> None:
    config = tiny(steps=20, micro_batch=2, evaluate_every=8, evaluation_rows=3)
    planned = plan(config, probe=True)
    found = planned["probe"]
    assert json.loads(json.dumps(planned)) == planned
    assert list(tmp_path.iterdir()) == []
    assert found["evaluations"] == 3
    assert found["rounds"] >= probe.ROUNDS
    least = 20 * found["seconds_per_step"] + 3 * found["seconds_per_evaluation"]
    assert least < 3600 * found["hours_total"] < 2 * least
    assert found["tokens_per_s"] == pytest.approx(4 * config.model.context / found["seconds_per_step"])
    assert found["operations_per_s"] > 0
    assert found["utilisation"] is None
    assert found["peak_memory_bytes"] is None or 50e6 < found["peak_memory_bytes"] < 2e9


@pytest.mark.parametrize(
    ("child", "said"),
    [
        (
            "raise ValueError('nothing works')",
            "micro_batch 4 failed: ValueError: nothing works; .* a smaller micro_batch",
        ),
        ("import os; os.kill(os.getpid(), 9)", "micro_batch 4 was ended by signal 9"),
    ],
)
def test_a_probe_that_fails_says_why(tiny: Make, monkeypatch: pytest.MonkeyPatch, child: str, said: str) -> None:
    monkeypatch.setattr(probe, "CHILD", child)
    with pytest.raises(ValueError, match=said):
        plan(tiny(), probe=True)


@pytest.mark.parametrize("fields", [{}, {"micro_batch": 3}, {"preset": "rotating-tango-mini-d4", "micro_batch": 1}])
def test_every_kind_of_step_is_measured(tiny: Make, fields: dict[str, object]) -> None:
    found = probe.measure(tiny(**fields))
    assert all(found[name] > 0 for name in ("seconds_per_step", "seconds_per_batch", "seconds_per_row"))


@pytest.mark.slow
def test_memory_is_what_the_runs_then_take() -> None:
    """Memory alone, and of the case with micro-batches and recomputation: seconds are held against their bars, and the others,
    by `tangolm bench dry-run --check`, on a machine that is not shared."""
    result = bench.run(bench.Options(("windowed",), steps=4, repeats=1))
    verdicts = judge(bench.BARS, result.options, {row.case: row for row in result.rows})
    assert [line for line, met in verdicts if "peak memory" in line and not met] == []
    text = "\n".join(bench.render(result))
    assert "| windowed |" in text
    json.dumps(result.to_dict(), allow_nan=False)


def test_cases_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match="cases has 'llama'; known: tango, loop, windowed"):
        bench.Options(("llama",))
    with pytest.raises(ValueError, match="steps must be at least 4"):
        bench.Options(steps=3)

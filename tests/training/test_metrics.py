"""`metrics.jsonl`: each step once, torn lines dropped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tangolm.training.metrics import MetricsWriter, drop_after, median_update_seconds, read_metrics


def write(path: Path, *steps: int) -> None:
    writer = MetricsWriter(path)
    for step in steps:
        writer.write({"kind": "train", "step": step, "seconds": float(step)})
    writer.sync()
    writer.close()


def test_records_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    write(path, 1, 2)
    write(path, 3)
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]


def test_torn_last_line_is_dropped_and_can_be_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3)
    whole = path.read_bytes()
    for cut in range(1, len(json.dumps(read_metrics(path)[-1]))):
        path.write_bytes(whole[: -1 - cut])
        assert [record["step"] for record in read_metrics(path)] == [1, 2]
    drop_after(path, 2)
    write(path, 3)
    assert path.read_bytes() == whole


def test_damaged_line_inside_is_refused_by_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n{"kind": \n{"kind": "train", "step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is not a JSON object"):
        read_metrics(path)


def test_drop_after_keeps_earlier_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3, 4)
    drop_after(path, 2)
    assert [record["step"] for record in read_metrics(path)] == [1, 2]
    drop_after(tmp_path / "missing.jsonl", 2)
    assert not (tmp_path / "missing.jsonl").exists()


def test_numbers_that_json_does_not_have_are_refused(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="not JSON compliant"):
        writer.write({"loss": float("nan")})
    writer.close()


def test_median_leaves_out_warm_up_and_evaluations() -> None:
    seconds = [100.0, 100.0, 100.0, 1.0, 2.0, 3.0]
    records = [{"kind": "train", "seconds": value} for value in seconds] + [{"kind": "evaluation"}]
    assert median_update_seconds(records) == 2.0
    assert median_update_seconds(records[:2]) == 100.0
    assert median_update_seconds([]) is None

"""`metrics.jsonl`: one JSON object a line, each step once, whatever interruptions the run has seen.

    {"kind": "train", "step": 1, "loss": .., "lr": .., "grad_norm": .., "tokens": .., "supervised_tokens": .., "samples": ..,
     "seconds": .., "tokens_per_s": .., "operations_per_s": .., "utilisation": .., "memory_bytes": ..}
    {"kind": "evaluation", "step": 1, "split": "dev", "nll": .., "nll_sum": .., "tokens": .., "accuracy": .., "best": true,
     "seconds": ..}
    {"kind": "spike", "step": 1, "loss": .., "usual": .., "sample_ids": [..], "last_good_checkpoint": ..}
    {"kind": "diverged", "step": 1, "what": "loss is nan", "sample_ids": [..], "last_good_checkpoint": ..}

The evaluation of a mixture has "parts" besides: {name: nll}; its own nll is their mean. Rows of one source each give "sources":
{name: nll}; heads with a temperature "temperatures": {"block 0": [tau of each head]}.

In a train line `tokens` counts all positions of the update, `samples` the sequences seen so far, and `seconds` is the
synchronised update alone, without data, evaluation and saving. `memory_bytes` is the process's peak so far (`memory`),
`operations_per_s` and `utilisation` are explained in `observe`; null is what the device does not tell.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tangolm.training.durable import write_text

if TYPE_CHECKING:
    from tangolm.training.logs import Log

WARMUP_UPDATES = 3  # the first updates of a process allocate, compile and fill caches; they say nothing about the rate


class MetricsWriter:
    """Appends records; each is flushed, so that a reader (or a killed run) loses a part of the last line at most.

    `logs` get each record too. Without a path nothing is written: a process that is not the first.
    """

    def __init__(self, path: Path | None, logs: Sequence[Log] = ()) -> None:
        self._logs = logs
        self._file = None if path is None else open(path, "a", encoding="utf-8", newline="\n")  # noqa: SIM115 (see `close`)

    def write(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        for log in self._logs:
            log.write(record)

    def sync(self) -> None:
        """Wait until the lines are on the disk: a checkpoint must not be newer than its metrics."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        for log in self._logs:
            log.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records; a last line that a killed run tore is dropped, a missing file is no records.

    Raises:
        ValueError: a line that is not a JSON object, other than a torn last one.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("not an object")
        except ValueError as error:
            if number == len(lines):  # without a newline behind it
                break
            raise ValueError(f"{path}, line {number} is not a JSON object: {line[:60]!r}; mend or delete it") from error
        records.append(record)
    return records


def drop_after(path: Path, step: int) -> None:
    """Keep the records up to `step`: what follows is going to be written again."""
    if path.exists():
        kept = [record for record in read_metrics(path) if record["step"] <= step]
        write_text(path, "".join(json.dumps(record) + "\n" for record in kept))


def median_update_seconds(records: Iterable[Mapping[str, Any]]) -> float | None:
    """Median duration of the updates in `records`, the first three left out where there are more; None without any."""
    return _settled(records, "seconds")


def median_tokens_per_second(records: Iterable[Mapping[str, Any]]) -> float | None:
    """Median rate of those updates."""
    return _settled(records, "tokens_per_s")


def _settled(records: Iterable[Mapping[str, Any]], name: str) -> float | None:
    values = [record[name] for record in records if record["kind"] == "train"]
    settled = values[WARMUP_UPDATES:] or values
    return statistics.median(settled) if settled else None

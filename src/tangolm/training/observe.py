"""What is recorded of a run while it trains, beside losses: rates, memory, temperatures, losses by source, spikes.

    operations_per_s = 2 * 3 * useful MACs of a sequence * sequences / seconds

A multiply-accumulate is two operations, forward is done once and backward twice, pairs that causality forbids and recomputation
do not count. `utilisation` is that over the device's own rate.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from tangolm.evaluation.nll import Evaluation
from tangolm.models import LanguageModel
from tangolm.training.distributed import ALONE, World, whole
from tangolm.training.environment import Place
from tangolm.training.memory import peak_memory_bytes
from tangolm.training.run import RunConfig

# Dense operations a second from NVIDIA's data sheets: bf16 on tensor cores, float32 outside them (PyTorch's default). The
# first name that the device's begins with counts.
RATES: dict[str, dict[str, float]] = {
    "NVIDIA H200": {"bf16": 989e12, "float32": 67e12},
    "NVIDIA H100 PCIe": {"bf16": 756e12, "float32": 51e12},
    "NVIDIA H100 80GB HBM3": {"bf16": 989e12, "float32": 67e12},
    "NVIDIA A100": {"bf16": 312e12, "float32": 19.5e12},
    "NVIDIA L40S": {"bf16": 362e12, "float32": 91.6e12},
    "NVIDIA L4": {"bf16": 121e12, "float32": 30.3e12},
    "NVIDIA GeForce RTX 4090": {"bf16": 165e12, "float32": 82.6e12},
    "NVIDIA GeForce RTX 3090": {"bf16": 71e12, "float32": 35.6e12},
}

# A loss is a spike above median + 10 MAD of the last 50, and 0.2 nats where the MAD is tiny. In 12 runs of the mini tier (2,200
# steps of 2,048 tokens on mathematics, code and recall) no step came higher than 5.1 MAD above the median.
SPIKE_WINDOW, SPIKE_MAD, SPIKE_LEAST = 50, 10.0, 0.2


class Rates:
    """Model operations a second of all processes, and their share of what their devices can do."""

    def __init__(self, config: RunConfig, place: Place, world: World = ALONE) -> None:
        self._operations = 2 * 3 * config.model.macs()["useful_macs"]
        known = (rates for name, rates in RATES.items() if place.device.type == "cuda" and place.name.startswith(name))
        peak = next(known, {}).get(place.precision)
        self._peak = None if peak is None else world.size * peak

    def of(self, sequences: int, seconds: float) -> dict[str, float | None]:
        """`operations_per_s` and `utilisation` (None where the device's rate is not known) of so many sequences."""
        rate = self._operations * sequences / seconds
        return {"operations_per_s": rate, "utilisation": None if self._peak is None else rate / self._peak}


class Spikes:
    """Judges each loss by the ones before it."""

    def __init__(self, losses: Iterable[float] = ()) -> None:
        self._last = deque(losses, maxlen=SPIKE_WINDOW)

    def usual(self, loss: float) -> float | None:
        """The median of the losses before, where `loss` is a spike above it; None where it is none. `loss` counts from now on."""
        found = None
        if len(self._last) == SPIKE_WINDOW:
            middle = median(self._last)
            deviation = median(abs(one - middle) for one in self._last)
            if loss > middle + max(SPIKE_MAD * deviation, SPIKE_LEAST):
                found = middle
        self._last.append(loss)
        return found


def recent_losses(records: Iterable[Mapping[str, Any]]) -> list[float]:
    """The losses that a resumed run is judged by: those that the undisturbed one would have seen."""
    return [record["loss"] for record in records if record["kind"] == "train"][-SPIKE_WINDOW:]


def spike_record(train: Mapping[str, Any], usual: float, sample_ids: list[int], good: str | None) -> dict[str, Any]:
    """The record of a spike behind that of its step."""
    return {
        "kind": "spike",
        "step": train["step"],
        "loss": train["loss"],
        "usual": usual,
        "sample_ids": sample_ids,
        "last_good_checkpoint": good,
    }


def diverged_record(step: int, what: str, sample_ids: list[int], good: str | None) -> dict[str, Any]:
    """The record of the step that a run stopped at; resuming drops it with that step."""
    return {"kind": "diverged", "step": step, "what": what, "sample_ids": sample_ids, "last_good_checkpoint": good}


def temperatures(model: LanguageModel) -> dict[str, list[float]]:
    """tau of each head by block; empty for an architecture without temperatures. Every process calls."""
    found = {}
    for index, block in enumerate(model.blocks):
        own = dict(block.named_parameters(recurse=False)).get("log_temperature")
        if own is not None:
            found[f"block {index}"] = [math.exp(value) for value in whole(own).float().tolist()]
    return found


def evaluation_fields(model: LanguageModel, result: Evaluation) -> dict[str, Any]:
    """What an evaluation record says besides the whole: NLL of the parts of a mixture and by source, temperatures."""
    taus = temperatures(model)
    return {
        **({"parts": {name: part["nll"] for name, part in result.parts.items()}} if result.parts else {}),
        **({"sources": {name: own["nll"] for name, own in result.sources.items()}} if result.sources else {}),
        **({"temperatures": taus} if taus else {}),
    }


def step_fields(rates: Rates, place: Place, sequences: int, seconds: float) -> dict[str, Any]:
    """What a train record says of speed and memory."""
    return {**rates.of(sequences, seconds), "memory_bytes": peak_memory_bytes(place.device)}


def rows_named(sample_ids: list[int], most: int = 16) -> str:
    """Rows of the training split in words, the first few of many."""
    shown = ", ".join(map(str, sample_ids[:most]))
    return (
        f"rows {shown}{f' and {len(sample_ids) - most} more' if len(sample_ids) > most else ''} of the training split"
    )

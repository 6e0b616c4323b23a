"""Which initial temperature and which feature map Windowed TANGO begins with: nine of them, full TANGO beside.

Mathematics, source code, and recall over 1,024 tokens (`data.recall`), which nothing in a window can answer. Mini tier, depth 4.
"""

from __future__ import annotations

import sysconfig

from tangolm.experiments.grid import Grid, System, Task

TOKENS = 204_800  # of a run: 200 steps
RECALL_TOKENS = 409_600  # full TANGO begins to find the bindings behind 250 of these 400 steps
TEMPERATURES = (2, 6, 12)
FEATURES = ("random", "exponential", "none")


def _windowed(temperature: int, features: str) -> System:
    overrides = [f"model.initial_temperature={temperature}", f"model.features={features}"]
    return System("windowed-tango-mini-d4", tuple(overrides))


GRID = Grid(
    summary="Windowed TANGO: initial temperature 2, 6, 12 and features random, exponential, none; TANGO beside",
    tasks={
        "mathematics": Task(
            "dm-mathematics",
            TOKENS,
            batch_size=4,
            options={"train_per_source": 14, "dev_per_module": 3, "test_per_module": 12},
        ),
        "source-code": Task(
            "text",
            TOKENS,
            batch_size=4,
            source=sysconfig.get_path("stdlib"),
            options={
                "suffixes": [".py"],
                "exclude": ["site-packages", "dist-packages", "__pycache__", "test", "tests", ".*"],
                "limit_bytes": 2_000_000,
            },
        ),
        "recall": Task("recall", RECALL_TOKENS, batch_size=1, options={"context": 1024}),
    },
    systems={
        "tango": System("tango-mini-d4"),
        **{
            f"tau-{temperature}-{features}": _windowed(temperature, features)
            for temperature in TEMPERATURES
            for features in FEATURES
        },
    },
    overrides=("evaluation_rows=64",),
)

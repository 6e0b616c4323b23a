"""Time and memory against T on double logarithmic axes, from the files of `tangolm bench growth`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

SUFFIXES = (".svg", ".png", ".pdf")


def write_drawing(results: Sequence[Path], out: Path) -> Path:
    """See `tangolm.report.write_growth`."""
    if out.suffix not in SUFFIXES:
        raise ValueError(f"out {str(out)!r} must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    records = [_read(path) for path in results]
    with matplotlib.rc_context({"svg.hashsalt": "growth", "svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(8.0, 3.4), layout="constrained")
        panels = figure.subplots(1, 2)
        for axes, key, unit, label in (
            (panels[0], "seconds", 1.0, "seconds, forward and backward"),
            (panels[1], "extra_bytes", 1e6, "peak memory, MB"),
        ):
            for record, marker in zip(records, "os^Dv" * len(records), strict=False):
                points = [(row["tokens"], row[key] / unit) for row in record["rows"] if row[key]]
                options = record["options"]
                name = f"{options['form']}, H {options['heads']}, E {options['gate_width']:,}"
                if points:
                    axes.plot(*zip(*points, strict=True), marker=marker, label=name)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
            axes.set_xlabel("T, tokens")
            axes.set_ylabel(label)
            axes.grid(alpha=0.3)
        panels[0].legend(frameon=False)
        figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None, dpi=150)
    return out


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a result ({error}); give files of bench growth --out") from error
    if not isinstance(record, dict) or record.get("benchmark") != "growth":
        raise ValueError(f"{path} is not a result of bench growth; give files of bench growth --out")
    return record

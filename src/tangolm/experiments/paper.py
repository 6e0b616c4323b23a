"""The paper's figures (arXiv:2608.22117), as package data, and their comparison with our own counts.

`paper_tables.json` holds every table that is at hand; a cell is a number, null, or an object with its spread or range.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from tangolm.models import preset
from tangolm.models.active_ratio import active_ratio
from tangolm.models.base import HeadsConfig

LONG = 8192
CONTEXTS = (LONG, 2048, 256)  # FineWeb-Edu; Lean and Stack; mathematics
TABLE_3 = {"tango": "tango_and_windowed", "loop": "loop", "untied": "untied", "flash": "flash"}  # family -> column


@dataclass(frozen=True)
class Comparison:
    """One figure of the paper beside ours; equal after rounding ours to the digits that the paper prints."""

    where: str
    paper: float
    ours: float
    digits: int

    @property
    def equal(self) -> bool:
        return round(self.ours, self.digits) == self.paper


@cache
def tables() -> dict[str, Any]:
    """Table number -> {"title", "rows"}."""
    text = files("tangolm.experiments").joinpath("paper_tables.json").read_text(encoding="utf-8")
    return json.loads(text)["tables"]


def rows(table: int) -> list[dict[str, Any]]:
    """The rows of a table.

    Raises:
        ValueError: a table that is not at hand.
    """
    if str(table) not in tables():
        raise ValueError(f"table {table} is not at hand; there are {', '.join(tables())}")
    return tables()[str(table)]["rows"]


def count_comparisons() -> list[Comparison]:
    """Every parameter figure of Tables 3, 6, 8 and 9 and every operation count for the architectures that exist here."""
    return [*_table_3(), *_table_6(), *_table_8(), *_table_9(), *_operations()]


def _table_3() -> list[Comparison]:
    out = []
    for row in rows(3):
        tier, depth = row["tier"].lower(), row["depth"]
        for family, key in TABLE_3.items():
            config = preset(f"{family}-{tier}-d{depth}")
            where = f"Table 3, {row['tier']} depth {depth}, {family}"
            out.append(Comparison(f"{where}: F", row[key], config.gated_width, 0))
            out.append(Comparison(f"{where}: d", row["d"], config.width, 0))
        # Ranges: GAU is as wide as the context lets it be, and counts go over all architectures and contexts.
        gau = [preset(f"gau-{tier}-d{depth}", context=context) for context in CONTEXTS]
        others = [preset(f"{family}-{tier}-d{depth}") for family in TABLE_3]
        counts = {config.parameters()["non_embedding"] / 1e6: config.architecture for config in [*gau, *others]}
        for end, choose in (("min", min), ("max", max)):
            where = f"Table 3, {row['tier']} depth {depth}"
            width = choose(config.gated_width for config in gau)
            count = choose(counts)
            printed = row["non_embedding_range"][f"millions_{end}"]
            out.append(Comparison(f"{where}, gau: {end}imum F", row["gau"][end], width, 0))
            out.append(Comparison(f"{where}, non-embedding {end}imum, {counts[count]}", printed, count, 3))
    return out


def _table_6() -> list[Comparison]:
    out = []
    for row in rows(6):
        config = preset(f"conventional-{row['tier'].lower()}-d{row['depth']}")
        counted = config.parameters()
        where = f"Table 6, {row['tier']} depth {row['depth']}, conventional"
        out += [
            Comparison(f"{where}: heads", row["heads"], config.width // 32, 0),
            Comparison(f"{where}: F/d", row["F_over_d"], config.gated_width / config.width, 3),
            Comparison(f"{where}: non-embedding", row["non_embedding"], counted["non_embedding"], 0),
            Comparison(f"{where}: total", row["total"], counted["total"], 0),
        ]
    return out


def _table_9() -> list[Comparison]:
    out = []
    for row in rows(9):
        for key, sets in (("tango", 1), ("sets3", 3)):
            config = active_ratio(row["target_F_over_d"], sets, context=LONG)
            where = f"Table 9, F/d {row['target_F_over_d']}, {'tango' if sets == 1 else 'tango-3-sets'}"
            total = config.parameters()["total"] / 1e6
            out += [
                Comparison(f"{where}: d", row[f"{key}_d"], config.width, 0),
                Comparison(f"{where}: F", row[f"{key}_F"], config.gated_width, 0),
                Comparison(f"{where}: heads", row[f"{key}_heads"], config.heads, 0),
                Comparison(f"{where}: F/d", row[f"{key}_realized"], config.gated_width / config.width, 3),
                Comparison(f"{where}: total", row[f"{key}_params"]["millions"], total, 3),
            ]
    return out


def _table_8() -> list[Comparison]:
    """The packed widths of the rotating models at 70M, depth 8; those of TANGO are given a head."""
    families = {
        "TANGO": "tango",
        "Windowed TANGO": "windowed-tango",
        "Loop Transformer++": "loop",
        "Untied Transformer++": "untied",
    }
    out = []
    for row in rows(8):
        family = families[row["architecture"]]
        config = preset(f"specialist-{family}-70m-d8")
        assert isinstance(config, HeadsConfig)
        width = config.gated_width / (config.heads if "TANGO" in row["architecture"] else 1)
        out.append(Comparison(f"Table 8, {family}: active packed width", row["active_packed_width"], width, 0))
    return out


def _operations() -> list[Comparison]:
    # The paper gives these for 70M, depth 4, T 8,192, in 10^12 multiply-accumulates of a forward pass.
    figures: list[tuple[str, float]] = [("tango-70m-d4", 9.44), ("loop-70m-d4", 1.94), ("windowed-tango-70m-d4", 1.90)]
    return [
        Comparison(f"operations, T 8,192, {name}", figure, preset(name, context=LONG).macs()["macs"] / 1e12, 2)
        for name, figure in figures
    ]

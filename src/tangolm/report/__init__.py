"""Runs to pages and tables: everything shown is read from the runs' folders."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tangolm.report.runs import RunRecord, read_run

__all__ = ["RunRecord", "read_run", "write_growth", "write_report"]


def write_report(
    runs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], title: str = "tangolm: report"
) -> Path:
    """Write one self-contained HTML page about some runs: no script, nothing loaded from elsewhere.

    Args:
        runs: folders of runs, finished or not, at least one.
        out: the file to write; paths in the page are relative to its folder.
        title: of the page.

    Returns:
        The file.

    Raises:
        ValueError: no runs, a folder that is not a run, or the packages of the extra "report" are missing.
    """
    try:
        from tangolm.report.page import write_page
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    return write_page([Path(run) for run in runs], Path(out), title)


def write_growth(results: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Path:
    """Draw how time and memory grow with T, from files that `tangolm bench growth --out` wrote.

    Args:
        results: the files, a curve each.
        out: the drawing to write; the suffix says which kind: .svg, .png or .pdf.

    Raises:
        ValueError: a file of something else, an unknown suffix, or the packages of the extra "report" are missing.
    """
    try:
        from tangolm.report.growth import write_drawing
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    return write_drawing([Path(result) for result in results], Path(out))


def _missing(error: ModuleNotFoundError) -> ValueError:
    return ValueError(f"a report needs {error.name}, which is missing; pip install 'tangolm[report]'")

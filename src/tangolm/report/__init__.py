"""Runs to pages and tables: everything shown is read from the runs' folders."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tangolm.report.runs import RunRecord, read_run

__all__ = ["RunRecord", "read_run", "write_report"]


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
        raise ValueError(f"a report needs {error.name}, which is missing; pip install 'tangolm[report]'") from error
    return write_page([Path(run) for run in runs], Path(out), title)

"""Text to token shards to batches. Knows nothing of models.

`prepare` turns a corpus into a folder of shards and a manifest, `mix` makes one of several; `open_data` and `Loader` read it.
A data set is a file and a line in `DATASETS`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tangolm.config import from_dict, suggest
from tangolm.data import dm_mathematics, fineweb_edu, lean, recall, stack, text
from tangolm.data.contents import show
from tangolm.data.loader import Batch, Loader, evaluation_batches
from tangolm.data.mixture import MixedSplit, data_sha256, mix, open_data, read_data
from tangolm.data.questions import Question, questions
from tangolm.data.shards import Split, open_split, read_manifest
from tangolm.data.source import DataSet, Progress, no_progress
from tangolm.data.tokenizer import TOKENIZERS, ByteTokenizer, Tokenizer, get_tokenizer

__all__ = [
    "DATASETS",
    "TOKENIZERS",
    "Batch",
    "ByteTokenizer",
    "DataSet",
    "Loader",
    "MixedSplit",
    "Progress",
    "Question",
    "Split",
    "Tokenizer",
    "data_sha256",
    "evaluation_batches",
    "get_tokenizer",
    "mix",
    "open_data",
    "open_split",
    "prepare",
    "questions",
    "read_data",
    "read_manifest",
    "show",
]

DATASETS = {
    "dm-mathematics": DataSet(
        "mathematics questions of 56 modules, generated here or read from the published archive",
        dm_mathematics.DmMathematicsOptions,
        dm_mathematics.prepare,
        needs_source=False,
    ),
    "fineweb-edu": DataSet(
        "web documents of FineWeb-Edu, partitioned by time, streamed or from local files",
        fineweb_edu.FineWebEduOptions,
        fineweb_edu.prepare,
        needs_source=False,
    ),
    "lean": DataSet(
        "Lean 4 source text, or its theorems and their proofs", lean.LeanOptions, lean.prepare, needs_source=True
    ),
    "recall": DataSet(
        "generated rows that ask for what stood at their beginning",
        recall.RecallOptions,
        recall.prepare,
        needs_source=False,
    ),
    "stack": DataSet(
        "source code: The Stack, a folder, or Python's standard library where nothing is given",
        stack.StackOptions,
        stack.prepare,
        needs_source=False,
    ),
    "text": DataSet("files of text or source code", text.TextOptions, text.prepare, needs_source=True),
}


def prepare(
    dataset: str,
    source: str | Path | None,
    out: str | Path,
    *,
    overwrite: bool = False,
    progress: Progress = no_progress,
    **options: Any,
) -> dict[str, Any]:
    """Prepare a data set in the folder `out`.

    Args:
        dataset: a key of `DATASETS`.
        source: the file or folder to read; None where the data set makes its own.
        out: a new or empty folder, or one that an interrupted preparation left.
        overwrite: replace prepared data that `out` already holds.
        progress: called with (done, total, text) as work goes on; total is 0 where it is not known.
        options: fields of the data set's options.

    Returns:
        The manifest.

    Raises:
        ValueError: an unknown data set or option, a value out of range, a source or folder that cannot be used.
    """
    if dataset not in DATASETS:
        raise ValueError(f"dataset {dataset!r} is not known{suggest(dataset, DATASETS)}")
    entry = DATASETS[dataset]
    return entry.prepare(source, out, from_dict(entry.options, options), progress, overwrite=overwrite)

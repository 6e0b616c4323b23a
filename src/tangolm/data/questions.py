"""Questions and answers read back from a split whose documents are a prompt and a supervised answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tangolm.data.mixture import MixedSplit
from tangolm.data.shards import Split


@dataclass(frozen=True)
class Question:
    """A prompt (its final newline included) and the answer that should follow, without the end token.

    `source` is the part of the split that the question is of and `module` that part without its level of difficulty; both
    are None in a split that mixes its sources in a row.
    """

    source: str | None
    module: str | None
    prompt_ids: list[int]
    answer_ids: list[int]
    row: int


def check_questions(split: Split | MixedSplit) -> Split:
    """The split, if it holds questions.

    Raises:
        ValueError: one without prompts, such as one of running text; one of a mixture.
    """
    if isinstance(split, MixedSplit):
        raise ValueError(f"data {str(split.folder)!r} is a mixture; questions are read from prepared data, not from it")
    if not split.document_masking:
        raise ValueError(
            f"data {str(split.folder)!r} is running text and holds no questions; take a split of dm-mathematics"
        )
    return split


def questions(split: Split | MixedSplit) -> list[Question]:
    """Every question of `split`, in row order.

    Raises:
        ValueError: a split without prompts, such as one of running text; one of a mixture.
    """
    split = check_questions(split)
    names: list[str | None] = [None] * split.rows
    for source in split.entry.sources:
        if source.rows is not None:
            names[slice(*source.rows)] = [source.name] * (source.rows[1] - source.rows[0])
    found = []
    for row in range(split.rows):
        tokens, supervised = split.row(row)
        start = 0
        for end in np.flatnonzero(tokens == split.end_token):
            if supervised[end]:  # else it is padding
                answer = start + int(np.argmax(supervised[start : end + 1]))
                found.append(
                    Question(
                        names[row],
                        module_of(names[row]),
                        tokens[start:answer].tolist(),
                        tokens[answer:end].tolist(),
                        row,
                    )
                )
            start = int(end) + 1
    return found


def module_of(source: str | None) -> str | None:
    """The module of a source: "algebra__linear_1d" of "algebra__linear_1d-easy"."""
    return source if source is None else source.partition("-")[0]

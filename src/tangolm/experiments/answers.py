"""The generated answers of a run's selected checkpoint to the questions of its test split, kept in the run's folder.

`RUN/evaluation/answers.json` stands beside `test.json` and is of the same checkpoint: the test split is met once.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from tangolm.data import get_tokenizer, questions
from tangolm.data.questions import check_questions
from tangolm.evaluation import exact_match
from tangolm.evaluation.generate import Progress
from tangolm.training import Run, environment, evaluate_run
from tangolm.training.durable import write_json
from tangolm.training.run import open_data

FORMAT = 1
NAME = "answers.json"


def answer_run(run: Run, *, samples: int = 20, progress: Progress | None = None) -> dict[str, Any]:
    """Answer all questions of the run's test split with its best checkpoint, or give the kept result.

    The test NLL is measured first if it has not been: both are of one checkpoint.

    Args:
        run: on data that holds questions.
        samples: how many answers to keep as text, evenly spaced over the split.
        progress: called with (questions done, in all, what) now and then.

    Returns:
        JSON data: format, split, step, weights_sha256, data_sha256, origin of the questions, and the fields of
        `evaluation.Answers`, the baselines of the untrained model and of the commonest answer included.

    Raises:
        ValueError: as `evaluate_run`; a split without questions.
    """
    split = open_data(run.config, "test")
    check_questions(split)  # before the test split is met
    test = evaluate_run(run, "test")
    path = run.folder / "evaluation" / NAME
    if path.exists():
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}); delete it to answer the questions again") from error
        if all(kept.get(name) == test[name] for name in ("weights_sha256", "data_sha256")):
            return kept
    model = run.load("best").to(environment.choose(run.config).device)
    answers = exact_match(
        model,
        questions(split),
        get_tokenizer(run.config.tokenizer),
        modules=split.manifest.get("modules"),
        untrained_seed=run.config.model_seed,
        samples=samples,
        progress=progress,
    )
    record = {
        "format": FORMAT,
        **{name: test[name] for name in ("split", "step", "weights_sha256", "data_sha256")},
        "origin": split.manifest.get("origin"),
        **dataclasses.asdict(answers),
    }
    write_json(path, record)
    return record

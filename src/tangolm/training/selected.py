"""The result of a run: its selected checkpoint (lowest development NLL) on a whole split, kept in the run's folder.

The test split is met once, by that checkpoint; asking again gives the kept result.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any

from tangolm.evaluation.nll import evaluate
from tangolm.models import load_model
from tangolm.training import checkpoint, environment
from tangolm.training.durable import write_json
from tangolm.training.run import Run, open_data

FORMAT = 1


def evaluate_run(
    run: Run | str | os.PathLike[str],
    split: str = "dev",
    *,
    data: str | os.PathLike[str] | None = None,
    batch_size: int = 8,
) -> dict[str, Any]:
    """Evaluate the best checkpoint of a run on all of a split, or give the kept result.

    Args:
        run: a run, or its folder.
        split: "dev" or "test". A kept "dev" result of an earlier best checkpoint is replaced.
        data: where the run's data is now; None: where it was.
        batch_size: sequences at a time.

    Returns:
        JSON data: format, split, step (of the checkpoint), finished (whether the run was), weights_sha256, data_sha256,
        nll, nll_sum, tokens, accuracy, rows, sources, parts (of a mixture).

    Raises:
        ValueError: no such run, checkpoint or split; data that is not the run's; a test result of another checkpoint.
    """
    run = run if isinstance(run, Run) else Run(run)
    config = run.config if data is None else dataclasses.replace(run.config, data=str(Path(data).resolve()))
    folder = run.best()
    weights = _sha256(folder / "model.safetensors")
    # A folder that is named is refused even where a kept result makes reading it needless.
    opened = None if data is None else open_data(config, split)
    kept = run.evaluation(split)
    if kept is not None:
        if kept.get("weights_sha256") == weights and kept.get("data_sha256") == config.data_sha256:
            return kept
        if split == "test":
            raise ValueError(
                f"the test split has met step {kept.get('step')} of run {run.folder}, but {folder.name} is now the best; "
                f"it is evaluated once: delete {run.folder / 'evaluation' / 'test.json'} to give that result up"
            )
    if opened is None:
        opened = open_data(config, split)
    state = checkpoint.verify(folder)
    last = checkpoint.read_state(run.last())
    place = environment.choose(config)
    model = load_model(folder, impl=config.impl).to(place.device)
    with place.autocast():
        result = evaluate(model, opened, batch_size, None, place.device)
    train_rows = opened.manifest["splits"]["train"]["rows"]
    record = {
        "format": FORMAT,
        "split": split,
        "step": state.step,
        "finished": last.step == config.budget(train_rows).steps,
        "weights_sha256": weights,
        "data_sha256": config.data_sha256,
        "precision": place.precision,
        **dataclasses.asdict(result),
    }
    (run.folder / "evaluation").mkdir(exist_ok=True)
    write_json(run.folder / "evaluation" / f"{split}.json", record)
    return record


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""The result of a run: its selected checkpoint (lowest development NLL) on a whole split, kept in the run's folder.

The test split is met once, by that checkpoint; asking again gives the kept result. The same holds for each other data that
the run is evaluated on:

RUN/evaluation/test.json                  the run's own data, wherever it lies now
               test-0123456789ab.json     other data, by the first twelve digits of its sha256
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from tangolm.config import ConfigError
from tangolm.data import mixture
from tangolm.data.mixture import MixedSplit
from tangolm.data.shards import Split
from tangolm.evaluation.nll import evaluate
from tangolm.models import load_model
from tangolm.training import checkpoint, environment
from tangolm.training.durable import file_sha256, write_json
from tangolm.training.run import Run, RunConfig, open_data, open_whole

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
        data: a prepared folder or mixture: the run's data where it is now, or other data of the same tokenizer, of any
            context that the architecture takes. Its hash tells which it is. None: the run's data, where it was.
        batch_size: sequences at a time.

    Returns:
        JSON data: format, split, step (of the checkpoint), finished (whether the run was; null where its own data is needed to
        tell and is gone), weights_sha256, data (the folder), data_sha256, nll, nll_sum, tokens, accuracy, rows, sources,
        parts (of a mixture).

    Raises:
        ValueError: no such run, checkpoint or split; data that does not fit the run; a test result of another checkpoint.
    """
    run = run if isinstance(run, Run) else Run(run)
    config, name, sha256 = run.config, split, run.config.data_sha256
    opened = None
    folder = run.best()
    weights = file_sha256(folder / "model.safetensors")
    if data is not None:
        # A folder that is named is refused even where a kept result makes reading it needless.
        config = dataclasses.replace(config, data=str(Path(data).resolve()))
        mixture.read_data(config.data)
        sha256 = mixture.data_sha256(config.data)
        if sha256 == config.data_sha256:
            opened = open_data(config, split)
        else:
            name = f"{split}-{sha256[:12]}"
            opened = _open_other(config, Path(data), split)
    kept = run.evaluation(name)
    if kept is not None:
        if kept.get("weights_sha256") == weights and kept.get("data_sha256") == sha256:
            return kept
        if split == "test":
            raise ValueError(
                f"the test split has met step {kept.get('step')} of run {run.folder}, but {folder.name} is now the best; "
                f"it is evaluated once: delete {run.folder / 'evaluation' / f'{name}.json'} to give that result up"
            )
    if opened is None:
        opened = open_data(config, split)
    state = checkpoint.verify(folder)
    last = checkpoint.read_state(run.last())
    place = environment.choose(config)
    model = load_model(folder, impl=config.impl).to(place.device)
    with place.autocast():
        result = evaluate(model, opened, batch_size, None, place.device)
    record = {
        "format": FORMAT,
        "split": split,
        "step": state.step,
        "finished": _finished(config if sha256 == config.data_sha256 else run.config, last.step),
        "weights_sha256": weights,
        "data": config.data,
        "data_sha256": sha256,
        "precision": place.precision,
        **dataclasses.asdict(result),
    }
    (run.folder / "evaluation").mkdir(exist_ok=True)
    write_json(run.folder / "evaluation" / f"{name}.json", record)
    return record


def _open_other(config: RunConfig, folder: Path, split: str) -> Split | MixedSplit:
    """A split of data that is not the run's, every shard hashed; the model must know its tokens."""
    manifest = mixture.read_data(folder)
    for name, ours in (("tokenizer", config.tokenizer), ("vocab_size", config.model.vocab_size)):
        if manifest[name] != ours:
            raise ConfigError(
                f"data {folder} has {name} {manifest[name]!r}, but the run was trained with {ours!r}; evaluate on data that "
                f"was prepared with --tokenizer {config.tokenizer}"
            )
    return open_whole(folder, split)


def _finished(config: RunConfig, step: int) -> bool | None:
    """Whether a run is at its last step; None where its length is in epochs of data that is not there."""
    rows = 0
    if config.epochs is not None:
        try:
            rows = mixture.read_data(config.data)["splits"]["train"]["rows"]
            if mixture.data_sha256(config.data) != config.data_sha256:
                return None
        except ValueError:
            return None
    return step == config.budget(rows).steps

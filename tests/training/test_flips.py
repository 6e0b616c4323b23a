"""Random single-byte changes in checkpoints, prepared data and the run's configuration: each refused, its file named.

`metrics.jsonl`, `environment.json` and kept evaluations carry no hash: nothing of a run's future is read from them.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tangolm.data.manifest import MANIFEST
from tangolm.models import build_model
from tangolm.training import CheckpointError, Run, RunConfig, checkpoint, train
from tangolm.training.optim import build_optimizer
from tangolm.training.run import open_data

Make = Callable[..., RunConfig]
FLIPS = 200
TEXT = 100  # more in a small file of text, where each byte means something of its own


def flips(path: Path, count: int, draw: random.Random) -> Iterator[str]:
    """Change one byte of the file at a time; the file is whole again behind the last."""
    whole = path.read_bytes()
    try:
        for _ in range(count):
            place, other = draw.randrange(len(whole)), draw.randrange(1, 256)
            path.write_bytes(whole[:place] + bytes([whole[place] ^ other]) + whole[place + 1 :])
            yield f"{path.name}, byte {place} of {len(whole)}, xor {other}"
    finally:
        path.write_bytes(whole)


def refused(read: Callable[[], object], error: type[ValueError], name: str, flip: str) -> None:
    """`read` raises `error`, and the message has `name`."""
    with pytest.raises(error) as raised:  # noqa: PT012
        read()
        pytest.fail(f"read in spite of {flip}")
    assert name in str(raised.value), flip


def test_in_a_checkpoint(tiny: Make, tmp_path: Path) -> None:
    config = tiny(steps=2)
    run = Run(train(config, tmp_path / "run", progress=False).folder)
    model = build_model(config.model, config.model_seed, config.impl)
    optimizer = build_optimizer(model, config.optimizer)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folder, draw, tried = run.best(), random.Random(0), 0
    for path in sorted(folder.iterdir()):
        for flip in flips(path, TEXT if path.suffix == ".json" else FLIPS // 4, draw):
            refused(lambda: checkpoint.verify(folder), CheckpointError, path.name, flip)
            refused(lambda: checkpoint.restore(folder, model, optimizer), CheckpointError, path.name, flip)
            if path.name != checkpoint.TRAINER:  # with a broken seal the run does not know the checkpoint at all
                refused(lambda: run.load("best"), CheckpointError, path.name, flip)
            tried += 1
    assert tried >= FLIPS
    assert all(bool((tensor == before[name]).all()) for name, tensor in model.state_dict().items())
    checkpoint.verify(folder)
    run.load("best")


@pytest.mark.case(29)
def test_in_the_data(tiny: Make, sums: Path, tmp_path: Path) -> None:
    data = shutil.copytree(sums, tmp_path / "data")
    config, draw, tried = tiny(data=data), random.Random(1), 0
    files = sorted(data.iterdir())
    assert {path.name for path in files} == {
        MANIFEST,
        *(f"{split}-00000.{kind}.npy" for split in ("train", "dev", "test") for kind in ("tokens", "supervised")),
    }
    for path in files:
        split = "train" if path.name == MANIFEST else path.name.partition("-")[0]
        name = "manifest" if path.name == MANIFEST else path.name
        for flip in flips(path, TEXT if path.name == MANIFEST else FLIPS // 6 + 1, draw):
            refused(lambda split=split: open_data(config, split), ValueError, name, flip)
            tried += 1
    assert tried >= FLIPS
    for split in ("train", "dev", "test"):
        open_data(config, split)


def test_in_the_configuration_of_the_run(tiny: Make, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", tiny())
    tried = 0
    for flip in flips(run.folder / "config.json", FLIPS, random.Random(2)):
        refused(lambda: Run(run.folder), ValueError, "config.json", flip)
        tried += 1
    assert tried == FLIPS
    assert Run(run.folder).config == run.config


def test_a_configuration_without_a_seal_is_of_an_older_version(tiny: Make, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", tiny())
    path = run.folder / "config.json"
    sealed = path.read_text()
    path.write_text(re.sub(r',\n "seal": "[0-9a-f]{64}"', "", sealed))
    assert path.read_text() != sealed
    assert Run(run.folder).config == run.config
    path.write_text(sealed.replace('"steps": 12', '"steps": 13'))
    with pytest.raises(ValueError, match=r"config\.json is damaged: it does not match its seal; .*--data"):
        Run(run.folder)

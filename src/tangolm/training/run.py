"""What a run is: its configuration, and the folder that holds everything it leaves.

RUN/config.json          {"format": 1, "run_id": .., "config": {..}, "seal": ..}; without the seal in runs of older versions
    environment.json     versions, device, precision, implementation, git revision of the last start (and earlier ones)
    metrics.jsonl        see `metrics`
    checkpoints/step-00000100/   see `checkpoint`; the last ones and the best one are kept
    evaluation/test.json         see `selected`
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tangolm.config import ConfigError, fingerprint, from_dict, override, to_dict
from tangolm.data import mixture
from tangolm.data.mixture import MixedSplit, data_sha256
from tangolm.data.shards import Split
from tangolm.models import LanguageModel, ModelConfig, config_class, load_model, preset, tier_of
from tangolm.training import checkpoint
from tangolm.training.durable import seal_holds, sealed, write_text
from tangolm.training.metrics import read_metrics
from tangolm.training.optim import OptimizerConfig, warmup_steps

FORMAT = 1
RESOLVE = {ModelConfig: config_class}
PEAK_LR = {"mini": 2e-3, "70m": 6e-4, "160m": 4e-4, "410m": 3e-4}
LONGEST, MOST_EPOCHS = 2**50, 1_000_000  # of a run; beyond is a slip of the hand
EVALUATIONS = 10  # a run that says nothing about it is evaluated this often
# Fields that decide no number: a run goes on where they differ.
FREE = ("data", "parallel", "keep_last", "init_from", "log")


class Budget(NamedTuple):
    """Length of a run: optimizer steps, and sequences they consume (the last step may have fewer than the others)."""

    steps: int
    samples: int


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides the numbers of a run; `run_config` makes one from a preset and a data folder.

    Args:
        model: the architecture.
        data: the prepared folder, or a mixture of some; not part of the run's identity, so that data can be moved.
        data_sha256: of the folder's manifest, which holds the hashes of all shards; of a mixture, of what it is made of.
        tokenizer: the one that the data was prepared with.
        optimizer: AdamW and its schedule.
        batch_size: sequences of an optimizer step, over all processes.
        micro_batch: sequences of one forward and backward pass of a process; None: all that it has of the batch.
        steps, tokens, epochs: length of the run, exactly one: optimizer steps; at most so many tokens in whole batches;
            passes over the training split, the parts of a mixture taken together (the last step is smaller where the batch
            does not divide them).
        model_seed: of the initial weights.
        init_from, init_sha256: the folder of the weights that the run begins with, and their hash (see `init_from`); None:
            weights drawn from `model_seed`.
        data_seed: of the order of the training sequences.
        evaluate_every: steps between development evaluations, the last step has one anyway; None: ten a run.
        evaluation_rows: rows of the development split (of each part of a mixture) that are evaluated; None: all.
        checkpoint_every: steps between checkpoints; None: at every evaluation.
        keep_last: so many of the last checkpoints are kept, and the best one.
        device: "auto" takes CUDA, then MPS, then the CPU.
        precision: "bf16" is autocast over float32 weights; "auto" takes it on a GPU that has it.
        impl: implementation of the tokens' interaction, "auto" takes the fastest.
        compile: train on `torch.compile`d passes.
        parallel: how several processes hold the model: "ddp" all of it each, "fsdp" a share each (`training.distributed`).
        recompute: form most activations again in the backward pass, for less memory (`LanguageModel.recompute`).
        log: where the records go besides `metrics.jsonl` (`logs`); decides no number.

    Raises:
        ConfigError: a value out of range.
    """

    model: ModelConfig
    data: str
    data_sha256: str
    tokenizer: str
    optimizer: OptimizerConfig
    batch_size: int = 8
    micro_batch: int | None = None
    steps: int | None = None
    tokens: int | None = None
    epochs: float | None = None
    model_seed: int = 17
    init_from: str | None = None
    init_sha256: str | None = None
    data_seed: int = 101
    evaluate_every: int | None = None
    evaluation_rows: int | None = None
    checkpoint_every: int | None = None
    keep_last: int = 1
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    precision: Literal["auto", "float32", "bf16"] = "auto"
    impl: str = "auto"
    compile: bool = False
    parallel: Literal["ddp", "fsdp"] = "ddp"
    recompute: bool = False
    log: tuple[Literal["tensorboard", "wandb"], ...] = ()

    def __post_init__(self) -> None:
        if self.epochs is not None:
            object.__setattr__(self, "epochs", float(self.epochs))  # one spelling of each value
        for name in (
            "batch_size",
            "micro_batch",
            "steps",
            "tokens",
            "evaluate_every",
            "evaluation_rows",
            "checkpoint_every",
            "keep_last",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
            if value is not None and value > LONGEST:
                raise ConfigError(f"{name} must be at most {LONGEST:,}, got {value}")
        for name in ("model_seed", "data_seed"):
            if not 0 <= getattr(self, name) < 2**32:
                raise ConfigError(f"{name} must be in [0, 2**32), got {getattr(self, name)}")
        if self.epochs is not None and not 0 < self.epochs <= MOST_EPOCHS:
            raise ConfigError(f"epochs must be above 0 and at most {MOST_EPOCHS:,}, got {self.epochs}")
        given = [
            f"{name}={getattr(self, name)}" for name in ("steps", "tokens", "epochs") if getattr(self, name) is not None
        ]
        if len(given) != 1:
            raise ConfigError(f"give exactly one of steps, tokens and epochs, got {', '.join(given) or 'none'}")
        if self.micro_batch is not None and self.micro_batch > self.batch_size:
            raise ConfigError(f"micro_batch must be at most batch_size {self.batch_size}, got {self.micro_batch}")
        if (self.init_from is None) != (self.init_sha256 is None):
            raise ConfigError(
                f"init_from and init_sha256 go together, got {self.init_from!r} and {self.init_sha256!r}; --init-from gives both"
            )
        for name in ("data_sha256", "init_sha256"):
            value = getattr(self, name)
            if value is not None and not re.fullmatch(r"[0-9a-f]{64}", value):
                raise ConfigError(f"{name} must be 64 hexadecimal digits, got {value!r}")
        if len(set(self.log)) < len(self.log):
            raise ConfigError(f"log must name each one once, got {list(self.log)}")
        for name in ("data", "tokenizer", "impl"):
            if not getattr(self, name):
                raise ConfigError(f"{name} must not be empty")

    def budget(self, train_rows: int) -> Budget:
        """Steps and sequences of the run over a training split of `train_rows` rows.

        Raises:
            ConfigError: fewer tokens than one batch, or a warm-up longer than the run.
        """
        if self.steps is not None:
            steps, samples = self.steps, self.steps * self.batch_size
        elif self.tokens is not None:
            step = self.batch_size * self.model.context
            steps = self.tokens // step
            samples = steps * self.batch_size
            if steps == 0:
                raise ConfigError(f"tokens must be at least {step} (batch_size times the context), got {self.tokens}")
        else:
            assert self.epochs is not None
            samples = max(1, math.floor(self.epochs * train_rows))
            steps = math.ceil(samples / self.batch_size)
        warmup_steps(self.optimizer, steps)
        return Budget(steps, samples)

    def evaluation_steps(self, steps: int) -> int:
        """Steps from one development evaluation to the next."""
        return self.evaluate_every or max(1, steps // EVALUATIONS)

    def checkpoint_steps(self, steps: int) -> int:
        """Steps from one scheduled checkpoint to the next."""
        return self.checkpoint_every or self.evaluation_steps(steps)

    @property
    def run_id(self) -> str:
        """Fingerprint of everything but the `FREE` fields."""
        return fingerprint({name: value for name, value in to_dict(self).items() if name not in FREE})


def config_from_dict(data: Mapping[str, Any]) -> RunConfig:
    """A run's configuration from JSON data, strictly.

    Raises:
        ConfigError: an unknown or missing key, a wrong type, a value out of range.
    """
    return from_dict(RunConfig, data, resolve=RESOLVE)


def run_config(
    preset_name: str | ModelConfig, data: str | os.PathLike[str], overrides: Iterable[str] = (), **fields: Any
) -> RunConfig:
    """The configuration of a run: a preset on a prepared folder, which brings vocabulary, context and tokenizer.

    Args:
        preset_name: such as "tango-mini-d4"; or a model's configuration, which gets the data's context.
        data: the prepared folder.
        overrides: dotted assignments, applied last: "model.depth=2", "optimizer.peak_lr=1e-3", "tokens=800000".
        fields: fields of `RunConfig`; without steps, tokens or epochs the run is one epoch.

    Raises:
        ValueError: an unknown preset, an unusable data folder, an unknown field, a value out of range.
    """
    folder = Path(data)
    manifest = mixture.read_data(folder)
    if isinstance(preset_name, str):
        model = preset(preset_name, vocab_size=manifest["vocab_size"], context=manifest["context"])
        tier = preset_name.split("-")[-2]
    else:
        model = dataclasses.replace(preset_name, context=manifest["context"])
        tier = tier_of(preset_name.width)
    overrides = list(overrides)
    base: dict[str, Any] = {
        "model": to_dict(model),
        "data": str(folder.resolve()),
        "data_sha256": data_sha256(folder),
        "tokenizer": manifest["tokenizer"],
        "optimizer": {"peak_lr": PEAK_LR[tier]},
    }
    if all(fields.get(name) is None for name in ("steps", "tokens", "epochs")):
        fields["epochs"] = 1.0
        if {assignment.partition("=")[0].strip() for assignment in overrides} & {"steps", "tokens"}:
            overrides.insert(0, "epochs=null")
    return override(config_from_dict({**base, **_plain(fields)}), overrides, resolve=RESOLVE)


def open_data(config: RunConfig, split: str, verify: bool = True) -> Split | MixedSplit:
    """A split of the run's data, every shard hashed unless another process of this machine does it.

    Raises:
        ValueError: data other than the run was configured for, an empty split, or a damaged shard, by name.
    """
    manifest = mixture.read_data(Path(config.data))
    sha256 = data_sha256(config.data)
    if sha256 != config.data_sha256:
        raise ValueError(
            f"data {config.data}: the manifest hashes to {sha256[:12]}.., data_sha256 is {config.data_sha256[:12]}..; "
            "the data was prepared anew: start another run, or prepare it again with the same arguments"
        )
    for name, ours in (
        ("vocab_size", config.model.vocab_size),
        ("context", config.model.context),
        ("tokenizer", config.tokenizer),
    ):
        if manifest[name] != ours:
            place = name if name == "tokenizer" else f"model.{name}"
            raise ConfigError(f"{place} is {ours!r} but the data in {config.data} has {manifest[name]!r}")
    return open_whole(config.data, split, verify)


def open_whole(data: str | os.PathLike[str], split: str, verify: bool = True) -> Split | MixedSplit:
    """A split of prepared data, every shard hashed unless `verify` is false.

    Raises:
        ValueError: no such data or split, an empty one, or a damaged shard, by name.
    """
    opened = mixture.open_data(Path(data), split)
    for part in opened.parts.values() if isinstance(opened, MixedSplit) else [opened]:
        if part.rows == 0:
            raise ValueError(f"data {part.folder}: the {split} split has no rows; prepare more text")
    if verify:
        opened.verify()
    return opened


def claim(folder: Path) -> None:
    """Make a run's folder, or take one that is empty or a run's already.

    Raises:
        ValueError: a file, or a folder with somebody else's files.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out {str(folder)!r} is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    foreign = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if foreign and not Run.exists(folder):
        raise ValueError(f"out {str(folder)!r} holds {foreign[0]!r} and no run; name a new or empty folder")


class Run:
    """A run's folder. Opening one reads its configuration; nothing is written.

    Raises:
        ValueError: not the folder of a run, or a damaged configuration.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.config = _read_config(self.folder)

    @staticmethod
    def exists(folder: str | os.PathLike[str]) -> bool:
        """Whether there is a run (whole or begun) in `folder`."""
        return (Path(folder) / "config.json").exists()

    @classmethod
    def create(cls, folder: str | os.PathLike[str], config: RunConfig) -> Run:
        """Write the configuration into `folder`, made if missing."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        record = {"format": FORMAT, "run_id": config.run_id, "config": to_dict(config)}
        write_text(path / "config.json", sealed(record))
        return cls(path)

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints stand."""
        return self.folder / "checkpoints"

    @property
    def metrics_path(self) -> Path:
        return self.folder / "metrics.jsonl"

    def metrics(self) -> list[dict[str, Any]]:
        """All records of `metrics.jsonl`."""
        return read_metrics(self.metrics_path)

    def environment(self) -> dict[str, Any] | None:
        """What the last start recorded; None before the first."""
        return _read_json(self.folder / "environment.json")

    def evaluation(self, split: str) -> dict[str, Any] | None:
        """The kept result of `selected.evaluate_run` on a split; None where there is none."""
        return _read_json(self.folder / "evaluation" / f"{split}.json")

    def last(self) -> Path:
        """Folder of the newest whole checkpoint.

        Raises:
            ValueError: there is none.
        """
        return self._last()[0]

    def best(self) -> Path:
        """Folder of the checkpoint with the lowest development NLL.

        Raises:
            ValueError: no checkpoint, no evaluation yet, or the folder is gone.
        """
        last, state = self._last()
        if state.best_step is None:
            raise ValueError(
                f"run {self.folder} has not been evaluated up to step {state.step}; train on with --resume"
            )
        best = last.with_name(checkpoint.folder_name(state.best_step))
        if not best.is_dir():
            raise ValueError(f"run {self.folder} has lost its best checkpoint {best.name}; the last one is {last.name}")
        return best

    def load(self, which: Literal["best", "last"] = "best", impl: str | None = None) -> LanguageModel:
        """The model of the best or last checkpoint, on the CPU, the checkpoint's hashes verified.

        Raises:
            ValueError: no such checkpoint, or a damaged one.
        """
        folder = self.best() if which == "best" else self.last()
        checkpoint.verify(folder)
        return load_model(folder, impl=self.config.impl if impl is None else impl)

    def _last(self) -> tuple[Path, checkpoint.State]:
        found, folders = checkpoint.newest(self.checkpoints), checkpoint.checkpoints(self.checkpoints)
        if found is None:
            if folders:
                checkpoint.read_state(folders[-1])  # says what is wrong with it
            raise ValueError(f"run {self.folder} has no checkpoint yet; train it first")
        if found != folders[-1]:
            warnings.warn(
                f"checkpoint {folders[-1].name} of run {self.folder} is damaged; {found.name} is taken", stacklevel=3
            )
        return found, checkpoint.read_state(found)


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], where: str = "") -> list[str]:
    """The fields in which two configurations (as JSON data) differ, with both values."""
    found = []
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        a, b = ours.get(name), theirs.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, f"{where}{name}.")
        elif a != b:
            found.append(f"{where}{name} is {json.dumps(a)} here and {json.dumps(b)} there")
    return found


def check_same(config: RunConfig, theirs: Mapping[str, Any], owner: str) -> None:
    """Refuse a configuration other than that of `owner`; the `FREE` fields do not count.

    Raises:
        ConfigError: naming every field that differs.
    """
    with contextlib.suppress(ConfigError):  # what this version does not know is named below
        theirs = to_dict(config_from_dict(theirs))  # a field that the run's version did not have is at its default
    free = dict.fromkeys(FREE)
    differing = differences({**to_dict(config), **free}, {**theirs, **free})
    if differing:
        raise ConfigError(f"{owner} has another configuration: {'; '.join(differing)}; use that one, or another --out")


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: to_dict(value) if dataclasses.is_dataclass(value) else value for name, value in fields.items()}


def _read_config(folder: Path) -> RunConfig:
    if not folder.is_dir():
        raise ValueError(f"run {folder} does not exist; give the --out folder of a training run")
    record = _read_json(folder / "config.json")
    if record is None:
        raise ValueError(
            f"{folder} is not the folder of a run: it has no config.json; give the --out folder of a training run"
        )
    if record.get("format") != FORMAT or not isinstance(record.get("config"), dict):
        raise ConfigError(f"{folder / 'config.json'} is not the configuration of a run of format {FORMAT}")
    older = record.keys() == {"format", "run_id", "config"}  # of a version that wrote no seal
    if not older and not seal_holds((folder / "config.json").read_text(encoding="utf-8")):
        raise ConfigError(
            f"{folder / 'config.json'} is damaged: it does not match its seal; restore it from a copy (values are changed by "
            "options, moved data is named by --data)"
        )
    return config_from_dict(record["config"])


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is damaged ({error}); restore it from a copy or start another run") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is damaged: not a JSON object; restore it from a copy or start another run")
    return data

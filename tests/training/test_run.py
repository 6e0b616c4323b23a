"""The run's configuration: strict, complete, and every field of it does something."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tangolm.config import ConfigError, to_dict
from tangolm.training import OptimizerConfig, Run, RunConfig, checkpoint, config_from_dict, plan, run_config, train
from tangolm.training import trainer as trainer_module
from tangolm.training.run import FREE, check_same
from tests.training.sums import CONTEXT, MEASURED

Make = Callable[..., RunConfig]
SHA = "0" * 64


def test_the_data_brings_vocabulary_context_and_tokenizer(sums: Path) -> None:
    config = run_config("tango-mini-d4", sums)
    assert (config.model.vocab_size, config.model.context, config.tokenizer) == (257, CONTEXT, "bytes")
    assert config.epochs == 1.0
    assert config.model.depth == 4
    assert Path(config.data).is_absolute()


@pytest.mark.parametrize(
    ("preset", "rate"),
    [
        ("tango-mini-d4", 2e-3),
        ("loop-70m-d8", 6e-4),
        ("conventional-70m-d4", 6e-4),
        ("untied-160m-d4", 4e-4),
        ("tango-410m-d8", 3e-4),
    ],
)
def test_peak_learning_rate_goes_by_tier(sums: Path, preset: str, rate: float) -> None:
    assert run_config(preset, sums).optimizer.peak_lr == rate


def test_overrides_come_last(sums: Path) -> None:
    config = run_config(
        "tango-mini-d4", sums, ["model.depth=2", "optimizer.peak_lr=1e-2", "batch_size=3", "tokens=2000"], batch_size=5
    )
    assert (config.model.depth, config.optimizer.peak_lr, config.batch_size) == (2, 1e-2, 3)
    assert (config.steps, config.tokens, config.epochs) == (None, 2000, None)
    assert run_config("tango-mini-d4", sums, ["epochs=2"]).epochs == 2.0
    assert run_config("tango-mini-d4", sums, optimizer=OptimizerConfig(peak_lr=1.0)).optimizer.peak_lr == 1.0


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["stepz=3"], "unknown key 'stepz'; did you mean 'steps'?"),
        (["optimizer.peak=3"], "unknown key 'optimizer.peak'"),
        (["steps=3", "tokens=3"], "exactly one of steps, tokens and epochs, got steps=3, tokens=3"),
        (["steps=null", "epochs=null"], "exactly one of steps, tokens and epochs, got none"),
        (["batch_size=0"], "batch_size must be at least 1, got 0"),
        (["batch_size=2.5"], "batch_size must be int, got 2.5"),
        (["micro_batch=9"], "micro_batch must be at most batch_size 8, got 9"),
        (["micro_batch=0"], "micro_batch must be at least 1"),
        (["epochs=0"], "epochs must be above 0"),
        (["steps=0"], "steps must be at least 1"),
        (["keep_last=0"], "keep_last must be at least 1, got 0"),
        (["init_from=x"], "init_from and init_sha256 go together, got 'x' and None; --init-from gives both"),
        (["init_from=x", "init_sha256=abc"], "init_sha256 must be 64 hexadecimal digits, got 'abc'"),
        (["tokens=-1"], "tokens must be at least 1"),
        (["model_seed=-1"], "model_seed must be in"),
        (["data_seed=4294967296"], "data_seed must be in"),
        (["evaluate_every=0"], "evaluate_every must be at least 1"),
        (["evaluation_rows=0"], "evaluation_rows must be at least 1"),
        (["checkpoint_every=0"], "checkpoint_every must be at least 1"),
        (["device=tpu"], "device must be one of 'auto', 'cpu', 'cuda', 'mps', got 'tpu'"),
        (["precision=fp16"], "precision must be one of"),
        (["impl="], "impl must not be empty"),
        (["tokenizer="], "tokenizer must not be empty"),
        (["data="], "data must not be empty"),
        (["data_sha256=abc"], "data_sha256 must be 64 hexadecimal digits"),
        (["compile=1"], "compile must be bool"),
        (["optimizer.warmup=1.5"], "optimizer: warmup must be"),
        (["optimizer.betas=[0.9]"], "optimizer.betas must have 2 items"),
        (["model.architecture=mamba"], "architecture 'mamba' is not known"),
        (['log=["mlflow"]'], "log[0] must be one of 'tensorboard', 'wandb', got 'mlflow'"),
        (['log=["wandb", "wandb"]'], "log must name each one once"),
        (["model.width=65"], "model: width must be"),
    ],
)
def test_invalid_field_is_refused_by_name(sums: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        run_config("tango-mini-d4", sums, overrides)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


valid = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 64),
        "micro_batch": st.just(1) | st.none(),
        "model_seed": st.integers(0, 2**32 - 1),
        "data_seed": st.integers(0, 2**32 - 1),
        "evaluate_every": st.integers(1, 1000) | st.none(),
        "evaluation_rows": st.integers(1, 1000) | st.none(),
        "checkpoint_every": st.integers(1, 1000) | st.none(),
        "keep_last": st.integers(1, 1000),
        "device": st.sampled_from(["auto", "cpu", "cuda", "mps"]),
        "precision": st.sampled_from(["auto", "float32", "bf16"]),
        "impl": st.sampled_from(["auto", "reference"]),
        "compile": st.booleans(),
        "parallel": st.sampled_from(["ddp", "fsdp"]),
        "recompute": st.booleans(),
        "log": st.sampled_from([(), ("tensorboard",), ("tensorboard", "wandb")]),
        "optimizer": st.builds(
            OptimizerConfig,
            peak_lr=st.floats(1e-8, 10),
            betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
            eps=st.floats(1e-12, 1e-3),
            weight_decay=st.floats(0, 1) | st.integers(0, 1),
            clip=st.floats(1e-3, 10) | st.none(),
            warmup=st.integers(0, 10) | st.floats(0, 0.999),
            final_fraction=st.floats(0, 1),
        ),
    }
)
lengths = (
    st.integers(1, 10**9).map(lambda n: {"steps": n})
    | st.integers(1, 10**12).map(lambda n: {"tokens": n})
    | st.floats(0.01, 1000).map(lambda n: {"epochs": n})
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=valid, length=lengths)
def test_any_valid_configuration_round_trips_through_json(sums: Path, fields: dict[str, Any], length: Any) -> None:
    config = run_config("tango-mini-d4", sums, **fields, **length)
    again = config_from_dict(json.loads(json.dumps(to_dict(config))))
    assert again == config
    assert again.run_id == config.run_id
    assert type(again.model) is type(config.model)


def test_one_value_has_one_fingerprint(sums: Path) -> None:
    config = run_config("tango-mini-d4", sums, epochs=3, optimizer={"peak_lr": 1})
    assert config.run_id == dataclasses.replace(config, epochs=3, optimizer=OptimizerConfig(peak_lr=1)).run_id
    assert config.run_id == run_config("tango-mini-d4", sums, epochs=3.0, optimizer={"peak_lr": 1.0}).run_id


@pytest.mark.parametrize(
    ("fields", "rows", "budget"),
    [
        ({"steps": 5}, 20, (5, 20)),
        ({"tokens": 5 * 4 * CONTEXT + 7}, 20, (5, 20)),
        ({"epochs": 3}, 9, (7, 27)),
        ({"epochs": 0.5}, 9, (1, 4)),
        ({"epochs": 0.001}, 9, (1, 1)),
    ],
)
def test_length_of_a_run(tiny: Make, fields: dict[str, Any], rows: int, budget: tuple[int, int]) -> None:
    assert tuple(tiny(**fields).budget(rows)) == budget


def test_fewer_tokens_than_a_batch_are_refused(tiny: Make) -> None:
    with pytest.raises(ConfigError, match=f"tokens must be at least {4 * CONTEXT} "):
        tiny(tokens=100).budget(20)


def observe(config: RunConfig, out: Path) -> dict[str, Any]:
    """All that a run shows, without clocks and names."""
    saved: list[int] = []
    compiled: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        save = trainer_module.checkpoint.save
        patch.setattr(
            trainer_module.checkpoint, "save", lambda *arguments: saved.append(arguments[3].step) or save(*arguments)
        )
        patch.setattr(torch, "compile", lambda model: compiled.append(type(model).__name__) or model)
        run = Run(train(config, out, progress=False).folder)
    metrics = [{k: v for k, v in record.items() if k not in MEASURED} for record in run.metrics()]
    environment = run.environment()
    assert environment is not None
    planned = {key: value for key, value in plan(config).items() if key != "run_id"}
    left = [path.name for path in checkpoint.checkpoints(run.checkpoints)]
    return {
        "metrics": metrics,
        "saved": saved,
        "left": left,
        "compiled": compiled,
        "impl": environment["impl"],
        "plan": planned,
        "files": sorted(path.name for path in run.folder.iterdir()),
    }


CHANGES: dict[str, Any] = {
    "model": "model.initial_temperature=5.0",
    "data": None,  # below
    "data_sha256": f"data_sha256={SHA}",
    "tokenizer": "tokenizer=words",
    "batch_size": "batch_size=3",
    "micro_batch": "micro_batch=2",
    "steps": "steps=5",
    "tokens": ["steps=null", "tokens=400"],
    "epochs": ["steps=null", "epochs=0.3"],
    "model_seed": "model_seed=23",
    "init_from": None,  # below
    "init_sha256": ["init_from=elsewhere", f"init_sha256={SHA}"],
    "data_seed": "data_seed=103",
    "evaluate_every": "evaluate_every=3",
    "evaluation_rows": "evaluation_rows=2",
    "checkpoint_every": "checkpoint_every=3",
    "keep_last": "keep_last=3",
    "device": "device=mps",
    "precision": "precision=bf16",
    "impl": "impl=auto",
    "compile": "compile=true",
    "parallel": "parallel=fsdp",
    "recompute": "recompute=true",
    "log": 'log=["tensorboard"]',
    "optimizer.peak_lr": "optimizer.peak_lr=1e-3",
    "optimizer.betas": "optimizer.betas=[0.8, 0.9]",
    "optimizer.eps": "optimizer.eps=1e-4",
    "optimizer.weight_decay": "optimizer.weight_decay=0.5",
    "optimizer.clip": "optimizer.clip=0.01",
    "optimizer.warmup": "optimizer.warmup=3",
    "optimizer.final_fraction": "optimizer.final_fraction=0.5",
}
REFUSED = {
    "data_sha256": "data_sha256 is",
    "tokenizer": "tokenizer is 'words'",
    "parallel": "parallel 'fsdp' shards a model over several processes and there is one",
    "init_sha256": "init_from 'elsewhere' is not a folder",
    "device": "device 'mps' is not available",
}


def test_every_field_has_its_change() -> None:
    names = {field.name for field in dataclasses.fields(RunConfig)} - {"optimizer"}
    names |= {f"optimizer.{field.name}" for field in dataclasses.fields(OptimizerConfig)}
    assert names == set(CHANGES)


@pytest.fixture(scope="session")
def baseline(sums: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return observe(base(sums), tmp_path_factory.mktemp("baseline") / "run")


def base(sums: Path, *overrides: str) -> RunConfig:
    changes = ["model.depth=2", "model.gated_width=96", *overrides]
    return run_config("tango-mini-d4", sums, changes, batch_size=4, device="cpu", impl="reference", steps=4)


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_changes_something_or_is_refused(
    sums: Path, tmp_path: Path, baseline: dict[str, Any], field: str
) -> None:
    if field == "init_from":
        at_one, at_two = (base(sums, f"init_from={place}", f"init_sha256={SHA}") for place in ("one", "two"))
        assert at_one.run_id == at_two.run_id
        with pytest.raises(ValueError, match="init_from 'two' is not a folder"):
            train(at_two, tmp_path / "run", progress=False)
        return
    if field == "data":
        config = base(shutil.copytree(sums, tmp_path / "copy"))
    else:
        change = CHANGES[field]
        config = base(sums, *([change] if isinstance(change, str) else change))
    assert (config.run_id == base(sums).run_id) == (field in FREE)
    if field in REFUSED:
        if field == "device" and torch.backends.mps.is_available():
            pytest.skip("this machine has the device")
        with pytest.raises(ValueError, match=REFUSED[field]):
            train(config, tmp_path / "run", progress=False)
        return
    assert observe(config, tmp_path / "run") != baseline


def test_a_run_of_a_version_without_some_field_is_this_one(tiny: Make) -> None:
    config = tiny("steps=2")
    earlier = to_dict(config)
    del earlier["recompute"]
    check_same(config, earlier, "it")
    with pytest.raises(ConfigError, match="it has another configuration: recompute is true here and false there"):
        check_same(dataclasses.replace(config, recompute=True), earlier, "it")
    with pytest.raises(ConfigError, match="novelty is null here and 3 there"):
        check_same(config, {**earlier, "novelty": 3}, "it")


def test_run_folder_that_is_none(tmp_path: Path, tiny: Make) -> None:
    with pytest.raises(ValueError, match="does not exist; give the --out folder"):
        Run(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"not the folder of a run: it has no config\.json"):
        Run(tmp_path)
    run = Run.create(tmp_path / "run", tiny())
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        run.load()
    path = run.folder / "config.json"
    whole = path.read_text()
    path.write_text(whole[:-20])
    with pytest.raises(ConfigError, match=r"config\.json is damaged"):
        Run(run.folder)
    path.write_text(whole.replace('"format": 1', '"format": 2'))
    with pytest.raises(ConfigError, match="not the configuration of a run of format 1"):
        Run(run.folder)


def test_best_needs_an_evaluation(tmp_path: Path, tiny: Make) -> None:
    run = Run(train(tiny(evaluate_every=12), tmp_path / "run", stop_after=2, progress=False).folder)
    assert run.last().name == "step-00000002"
    with pytest.raises(ValueError, match="has not been evaluated up to step 2"):
        run.best()


def test_a_model_loads_from_a_run(tmp_path: Path, tiny: Make) -> None:
    run = Run(train(tiny(steps=4), tmp_path / "run", progress=False).folder)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(run.load("best")(tokens).logits, run.load("last")(tokens).logits)


def test_data_of_another_shape_is_refused_by_name(tiny: Make, tmp_path: Path) -> None:
    for override, said in (
        ("model.vocab_size=300", "model.vocab_size is 300"),
        ("model.context=64", "model.context is 64"),
    ):
        with pytest.raises(ConfigError, match=said):
            train(tiny(override), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()

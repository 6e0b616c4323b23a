"""Saved models: damaged, foreign and half-written folders are refused by name."""

from __future__ import annotations

import json

import pytest
import torch

from tangolm.models import load_model, read_tokenizer_name, save_model
from tests.models.tiny import build


@pytest.fixture
def folder(tmp_path):
    save_model(build("tango"), tmp_path / "model", tokenizer="bytes")
    return tmp_path / "model"


def test_round_trip(folder) -> None:
    model, loaded = build("tango"), load_model(folder)
    assert read_tokenizer_name(folder) == "bytes"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    save_model(model.bfloat16(), folder)
    assert load_model(folder).embedding.weight.dtype == torch.bfloat16


def test_nothing_there(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"holds no model \(config\.json is missing\)"):
        load_model(tmp_path)


def test_weights_missing(folder) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        load_model(folder)


def test_weights_cut(folder) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        load_model(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 2, "tokenizer": "bytes", "model": {}}', '{"format": 1}'])
def test_damaged_configuration(folder, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json is (damaged|not a tangolm model)"):
        load_model(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "tengo"}, "did you mean 'tango'"),
        ({"widht": 3}, "unknown key 'model.widht'"),
        ({"width": "64"}, "model.width must be int"),
        ({"gated_width": 96}, "does not fit"),
        ({"looped": False}, "does not fit"),
    ],
)
def test_foreign_configuration(folder, change: dict, message: str) -> None:
    record = json.loads((folder / "config.json").read_text())
    record["model"].update(change)
    (folder / "config.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=message):
        load_model(folder)

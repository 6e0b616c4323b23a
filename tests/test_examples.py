"""The examples run and reach what their texts claim."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.slow
def test_tango_layer() -> None:
    import tango_layer

    assert tango_layer.main() > 0.9


@pytest.mark.slow
def test_train_on_text(tmp_path: Path) -> None:
    import train_on_text

    text = tmp_path / "source.py"
    text.write_text((Path(sysconfig.get_path("stdlib")) / "inspect.py").read_text())
    nll = train_on_text.main(text, tmp_path / "out", steps=20)
    assert set(nll) == {"tango-mini-d4", "loop-mini-d4"}
    assert all(1.0 < value < 4.5 for value in nll.values()), nll  # below ln 257 = 5.5: something was learned
    again = train_on_text.main(text, tmp_path / "out", steps=20)
    assert again == nll


def test_every_example_is_run_here() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {"tango_layer", "train_on_text"}

"""Ways to train that must not change what is trained: each against the plain run, for one of every kind of architecture.

Recomputing gives the plain run's bits. Accumulation and compiled passes add the same numbers in another order.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tangolm.training import Run, RunConfig, train
from tests.training.sums import same_bits, weights

ARCHITECTURES = {
    "tango": (),
    "tango-3-sets": ("model.depth=3",),
    "windowed-tango": ("model.window=8",),
    "compact-tango": (),
    "rotating-tango": (),
    "loop": (),
    "untied": (),
    "gau": ("model.shared_width=16",),
    "flash": ("model.shared_width=16", "model.group=8"),
}
WAYS = {  # fields of the other run, and how far its losses may be off; 0: not a bit, weights and moments included
    "recompute": (("recompute=true",), 0.0),
    "accumulate": (("micro_batch=1",), 1e-5),
    "accumulate unevenly": (("micro_batch=3", "recompute=true"), 1e-5),
}


def run(tiny: Callable[..., RunConfig], family: str, out: Path, *fields: str) -> Run:
    config = tiny(
        "model.gated_width=80", *ARCHITECTURES[family], *fields, preset=f"{family}-mini-d4", steps=4, evaluate_every=4
    )
    return Run(train(config, out, progress=False).folder)


def losses(run: Run) -> list[float]:
    return [record["loss"] if record["kind"] == "train" else record["nll"] for record in run.metrics()]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[..., RunConfig], str], Run]:
    """The plain run of a family, done once."""
    done: dict[str, Run] = {}

    def of(tiny: Callable[..., RunConfig], family: str) -> Run:
        if family not in done:
            done[family] = run(tiny, family, tmp_path_factory.mktemp("plain") / family)
        return done[family]

    return of


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_it_is_the_plain_run(
    tiny: Callable[..., RunConfig],
    tmp_path: Path,
    plain: Callable[[Callable[..., RunConfig], str], Run],
    family: str,
    way: str,
) -> None:
    fields, tolerance = WAYS[way]
    ours, theirs = plain(tiny, family), run(tiny, family, tmp_path / "run", *fields)
    if tolerance == 0:
        assert losses(ours) == losses(theirs)
        assert same_bits(weights(ours.last()), weights(theirs.last()))
    else:
        assert losses(theirs) == pytest.approx(losses(ours), rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["tango", "windowed-tango", "loop", "gau"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # its compiler uses what it deprecates
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_compiled_is_the_plain_run(
    tiny: Callable[..., RunConfig],
    tmp_path: Path,
    plain: Callable[[Callable[..., RunConfig], str], Run],
    family: str,
) -> None:
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler here")
    torch._dynamo.reset()
    ours = plain(tiny, family)
    for number, fields in enumerate((("compile=true",), ("compile=true", "recompute=true", "micro_batch=2"))):
        theirs = run(tiny, family, tmp_path / str(number), *fields)
        assert losses(theirs) == pytest.approx(losses(ours), rel=1e-4)

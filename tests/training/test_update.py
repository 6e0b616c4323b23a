"""One optimizer step: accumulation gives the whole batch's gradient, and nothing moves on a number that is none."""

from __future__ import annotations

import pytest
import torch

import tangolm
from tangolm.data.loader import Batch
from tangolm.models import LanguageModel
from tangolm.training.distributed import Parallel
from tangolm.training.environment import Place
from tangolm.training.optim import OptimizerConfig, build_optimizer
from tangolm.training.update import NonFinite, accumulate, update

HERE = Place(torch.device("cpu"), "float32")


def build(preset: str) -> LanguageModel:
    return tangolm.build_model(tangolm.preset(preset, vocab_size=97, context=128, depth=2, gated_width=64))


def uneven() -> Batch:
    """Two samples with 11 and 101 supervised tokens."""
    tokens = torch.randint(0, 97, (2, 120), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[0, 12:] = -100
    labels[1, 102:] = -100
    labels[:, 0] = -100
    return Batch(tokens, labels, None, torch.arange(2))


def gradient(model: LanguageModel, batch: Batch, micro_batch: int) -> tuple[float, int, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss, tokens = accumulate(Parallel(model), batch, micro_batch=micro_batch, place=HERE)
    return loss, tokens, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.case(20)
@pytest.mark.parametrize("preset", ["tango-mini-d4", "loop-mini-d4", "untied-mini-d4"])
def test_accumulation_gives_the_gradient_of_the_whole_batch(preset: str) -> None:
    model, batch = build(preset), uneven()
    whole_loss, whole_tokens, whole = gradient(model, batch, 2)
    loss, tokens, pieces = gradient(model, batch, 1)
    assert tokens == whole_tokens == 11 + 101
    assert loss == pytest.approx(whole_loss, rel=1e-6)
    assert pieces.keys() == whole.keys()
    assert whole
    for name, expected in whole.items():
        assert (pieces[name] - expected).abs().max() <= 1e-5 * expected.abs().max(), name


def test_document_boundaries_do_not_count() -> None:
    model = build("tango-mini-d4")
    tokens = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(1))
    documents = (torch.arange(16) // 5).expand(2, 16)
    batch = Batch(tokens, tokens, documents, torch.arange(2))
    _, counted, _ = gradient(model, batch, 1)
    assert counted == 2 * (16 - 4)


def test_batch_without_supervised_tokens_has_no_gradient() -> None:
    model = build("tango-mini-d4")
    tokens = torch.zeros((2, 8), dtype=torch.long)
    loss, counted, gradients = gradient(model, Batch(tokens, torch.full_like(tokens, -100), None, torch.arange(2)), 1)
    assert (loss, counted) == (0.0, 0)
    assert all(float(g.abs().max()) == 0 for g in gradients.values())


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_clipping_scales_the_gradient(clip: float | None) -> None:
    model = build("tango-mini-d4")
    optimizer = build_optimizer(model, OptimizerConfig(peak_lr=1e-3))
    done = update(
        Parallel(model),
        optimizer,
        uneven(),
        lr=1e-3,
        clip=clip,
        micro_batch=2,
        place=HERE,
    )
    norm = float(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm())
    assert done.grad_norm > 1e-3
    assert norm == pytest.approx(done.grad_norm if clip is None else clip, rel=1e-3)


def test_weights_are_untouched_by_a_loss_that_is_not_finite() -> None:
    model = build("tango-mini-d4")
    optimizer = build_optimizer(model, OptimizerConfig(peak_lr=1e-3))
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(NonFinite, match="loss is nan"):
        update(
            Parallel(model),
            optimizer,
            uneven(),
            lr=1e-3,
            clip=1.0,
            micro_batch=2,
            place=HERE,
        )
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.nan_to_num(7.0), before[name].nan_to_num(7.0)), name

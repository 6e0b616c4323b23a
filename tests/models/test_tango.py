"""The properties that make the block TANGO."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tangolm.models.layers import Application, Layout, rope_tables
from tests.models.tiny import assert_equal, build, livelier


def layout(tokens: int, dtype: torch.dtype = torch.float64) -> Layout:
    positions = torch.arange(tokens)[None]
    return Layout(positions, rope_tables(positions, 32, 10_000.0, dtype), None, None)


FIRST = Application(0)


def block_by_loops(block: torch.nn.Module, h: torch.Tensor) -> torch.Tensor:
    """The equations of the paper, destination by destination and source by source, for one row [T, d]."""
    heads, tokens = block.heads, h.shape[0]
    x = h / (h.square().mean(-1, keepdim=True) + block.norm.eps).sqrt() * block.norm.weight
    q, k = (w.weight @ x.T for w in (block.query, block.key))
    g, u = F.silu(block.sets[0].gate.weight @ x.T), block.sets[0].projection.weight @ x.T
    channels = g.shape[0] // heads
    out = torch.zeros(tokens, g.shape[0], dtype=h.dtype)

    def turned(v: torch.Tensor, position: int) -> torch.Tensor:
        v = v / v.norm()
        frequencies = 10_000.0 ** (-torch.arange(16, dtype=v.dtype) / 16) * position
        pairs = torch.complex(v[:16], v[16:]) * torch.polar(torch.ones_like(frequencies), frequencies)
        return torch.cat([pairs.real, pairs.imag])

    for head in range(heads):
        rows, span = slice(32 * head, 32 * head + 32), slice(channels * head, channels * (head + 1))
        tau = block.log_temperature[head].exp()
        for i in range(tokens):
            scores = [tau * turned(q[rows, i], i) @ turned(k[rows, j], j) for j in range(i + 1)]
            weights = torch.stack(scores).exp()
            weights = weights / weights.sum()
            mean = sum(weight * g[span, j] for j, weight in enumerate(weights))
            out[i, span] = mean * u[span, i]
    return out @ block.sets[0].output.weight.T


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_block_equals_the_equations(impl: str) -> None:
    block = livelier(build("tango", impl)).double().blocks[0]
    h = torch.randn(11, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert_equal(block(h[None], layout(11), FIRST)[0], block_by_loops(block, h), 1e-10)


def test_one_token_is_a_swiglu_feed_forward() -> None:
    block = livelier(build("tango")).double().blocks[0]
    h = torch.randn(1, 1, 64, dtype=torch.float64)
    with torch.no_grad():
        x = block.norm(h)
        swiglu = block.sets[0].output(F.silu(block.sets[0].gate(x)) * block.sets[0].projection(x))
        assert_equal(block(h, layout(1), FIRST), swiglu, 1e-12)


def test_linear_in_the_destination_with_a_diagonal_core() -> None:
    """For fixed sources, y_i = W_o diag(mean gate) W_u x_i: linear in W_u, channel by channel."""
    model = livelier(build("tango")).double()
    block = model.blocks[0]
    h = torch.randn(1, 6, 64, dtype=torch.float64)
    with torch.no_grad():
        base = block(h, layout(6), FIRST)
        u = block.sets[0].projection.weight.clone()
        block.sets[0].projection.weight.copy_(-2.5 * u)
        assert_equal(block(h, layout(6), FIRST), -2.5 * base, 1e-12)
        # One channel alone reaches the output only through its own column of W_o.
        block.sets[0].projection.weight.zero_()
        block.sets[0].projection.weight[7] = u[7]
        alone = block(h, layout(6), FIRST)
        column = block.sets[0].output.weight[:, 7]
        assert torch.linalg.matrix_rank(alone[0], tol=1e-9) == 1
        assert_equal(alone[0] @ column[:, None] * column / column.square().sum(), alone[0], 1e-9)


def test_initial_temperature_and_counts() -> None:
    model = build("tango", initial_temperature=5.7)
    assert_equal(model.blocks[0].temperature.detach(), torch.full((2,), 5.7), 1e-6)
    d, gated, heads = 64, 48, 2
    assert model.config.parameters()["non_embedding"] == 3 * d * gated + 2 * d * d + 2 * d + heads


def test_gated_width_is_a_multiple_of_the_heads() -> None:
    with pytest.raises(ValueError, match="gated_width must be a multiple of the 2 heads, got 49"):
        build("tango", gated_width=49)
    with pytest.raises(ValueError, match="initial_temperature must be above 0"):
        build("tango", initial_temperature=0.0)


@pytest.mark.case(18)
def test_temperature_moves_in_float32() -> None:
    """Master weights stay float32 under autocast, so that small updates of tau and norms are not rounded away."""
    moved = {}
    for precision in ("float32", "bf16"):
        model = build("tango")
        optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, weight_decay=0.0)
        ids = torch.arange(24)[None] % 97
        for _ in range(100):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
                loss = model(ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        block = model.blocks[0]
        moved[precision] = (block.log_temperature - math.log(12.0)).abs().mean(), (block.norm.weight - 1).abs().mean()
    for wide, narrow in zip(moved["float32"], moved["bf16"], strict=True):
        assert wide > 1e-3
        assert 0.5 < narrow / wide < 2


def test_scores_stay_float32_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    from tangolm import ops

    seen = {}

    def spy(query, key, gate, temperature, document_ids, mask, silu):
        seen.update(query=query.dtype, key=key.dtype, gate=gate.dtype, temperature=temperature.dtype)
        return ops.reference.aggregate_gates(query, key, gate, temperature, document_ids, mask, silu)

    monkeypatch.setitem(ops.IMPLS, "reference", spy)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        build("tango", "reference")(torch.arange(5)[None])
    wide, narrow = torch.float32, torch.bfloat16
    assert seen == {"query": wide, "key": wide, "gate": narrow, "temperature": wide}

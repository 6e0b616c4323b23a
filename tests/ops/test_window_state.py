"""The windowed averaging from a state: token by token, in pieces and at once are the same, for any number of tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tangolm import ops
from tangolm.ops.compare import Inputs, draw
from tangolm.ops.features import random_directions
from tangolm.ops.window import definition
from tangolm.ops.window_sums import Sums

W = 8
forms = pytest.mark.parametrize("impl", list(ops.WINDOWED))


def directions(far: bool = True, count: int = 32) -> Tensor | None:
    return random_directions(2, count, 32, torch.Generator().manual_seed(5)).double() if far else None


def call(
    inputs: Inputs,
    some: slice,
    features: Tensor | None,
    state: ops.WindowState | None,
    impl: str = "chunked",
    window: int = W,
) -> Tensor:
    return ops.aggregate_gates(
        *(x[:, some] for x in (inputs.query, inputs.key, inputs.gate)),
        inputs.temperature,
        window=window,
        features=features,
        document_ids=None if inputs.document_ids is None else inputs.document_ids[:, some],
        mask=None if inputs.mask is None else inputs.mask[:, some],
        state=state,
        impl=impl,
    )


def continued(inputs: Inputs, cuts: list[int], features: Tensor | None, **how: object) -> Tensor:
    """In pieces of those lengths."""
    assert sum(cuts) == inputs.query.shape[1]
    state, outs, start = ops.WindowState(), [], 0
    for length in cuts:
        outs.append(call(inputs, slice(start, start + length), features, state, **how))  # type: ignore[arg-type]
        start += length
    assert state.length == start
    return torch.cat(outs, 1)


def loops(inputs: Inputs, features: Tensor | None, window: int = W) -> Tensor:
    return definition(*inputs.differentiable, features, window, inputs.document_ids, inputs.mask)


@forms
@pytest.mark.parametrize("far", [True, False], ids=["features", "no features"])
@pytest.mark.parametrize("given", ["tokens", "documents", "left padding", "holes", "documents and holes"])
@pytest.mark.parametrize(
    "cuts", [[1] * 45, [45], [6, 5, 34], [17, 1, 1, 1, 9, 16], [7, 8, 9, 1, 20], [16, 8, 8, 1, 12]]
)
def test_pieces_equal_loops(impl: str, far: bool, given: str, cuts: list[int]) -> None:
    ids = mask = None
    if "documents" in given:
        ids = torch.stack([(torch.arange(45) >= 20).long() + 3, torch.arange(45) // 13, torch.zeros(45).long()])
    if given == "left padding":
        mask = torch.arange(45) >= torch.tensor([[0], [4], [19]])
    if "holes" in given:
        mask = torch.rand(3, 45, generator=torch.Generator().manual_seed(1)) < 0.6
        mask[2, :22] = False
    inputs = draw(3, 45, 2, 32, 3, dtype=torch.float64, document_ids=ids, mask=mask)
    out = continued(inputs, cuts, directions(far), impl=impl)
    torch.testing.assert_close(out, loops(inputs, directions(far)), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_any_pieces_of_anything(seed: int) -> None:
    """Windows, lengths, documents, holes and cuts by chance."""
    generator = torch.Generator().manual_seed(seed)

    def below(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    window, tokens = 1 + below(12), 1 + below(60)
    ids = (torch.rand(2, tokens, generator=generator) < 0.08).cumsum(1) if below(2) else None
    mask = torch.rand(2, tokens, generator=generator) < 0.7 if below(2) else None
    inputs = draw(2, tokens, 2, 32, 3, dtype=torch.float64, document_ids=ids, mask=mask, seed=seed)
    cuts = []
    while sum(cuts) < tokens:
        cuts.append(min(1 + below(1 + below(20)), tokens - sum(cuts)))
    features = directions(below(3) > 0, 1 + below(40))
    for impl in ops.WINDOWED:
        out = continued(inputs, cuts, features, impl=impl, window=window)
        torch.testing.assert_close(out, loops(inputs, features, window), rtol=1e-11, atol=1e-12)


def test_documents_go_on_where_none_are_given() -> None:
    inputs = draw(1, 30, 2, 32, 3, dtype=torch.float64, document_ids=(torch.arange(30) >= 5).long()[None])
    bare = Inputs(*inputs.differentiable, inputs.grad)
    state, features = ops.WindowState(), directions()
    first = call(inputs, slice(0, 7), features, state)
    rest = [call(bare, slice(a, b), features, state) for a, b in ((7, 20), (20, 21), (21, 30))]
    torch.testing.assert_close(torch.cat([first, *rest], 1), loops(inputs, features), rtol=1e-11, atol=1e-12)


@pytest.mark.case(11)
def test_ten_thousand_more_steps() -> None:
    """A prompt of 6, then 5 tokens, then 10,000 one at a time in float32: all equal the whole, the last no worse than the
    first thousand, and the state stops growing. Judged against one pass in float64."""
    tokens = 10_011
    inputs = draw(1, tokens, 2, 32, 3, temperature=2.0)
    inputs.gate.add_(1.0)  # a mean, so that sums grow
    features = directions()
    assert features is not None
    exact = ops.aggregate_gates(*(x.double() for x in inputs.differentiable), window=W, features=features)
    state, outs, held = ops.WindowState(), [], []
    with torch.no_grad():
        outs = [call(inputs, slice(a, b), features.float(), state) for a, b in ((0, 6), (6, 11))]
        for t in range(11, tokens):
            outs.append(call(inputs, slice(t, t + 1), features.float(), state))
            held.append(state.bytes)
    assert len(set(held)) == 1, "the state grows"
    error = (torch.cat(outs, 1) - exact).abs().amax((0, 2, 3))
    assert error.max() < 1e-5
    assert error[-1000:].mean() < 3 * error[:1000].mean(), "the sums drift"


def test_size_of_the_state() -> None:
    """At most 2W - 1 keys and gates, and the sums: 2 m and m E a head."""
    features = directions()
    assert features is not None
    state = ops.WindowState()
    assert state.bytes == 0
    inputs = draw(3, 50, 2, 32, 5)
    call(inputs, slice(0, 50), features.float(), state)
    assert state.bytes == 4 * 3 * 2 * ((2 * W - 1) * (32 + 5) + 64 * (2 + 5)) + 8 * 3


def test_rows_in_another_order() -> None:
    ids = torch.stack([torch.arange(40) // 15, torch.arange(40) // 33, torch.zeros(40).long()])
    mask = torch.arange(40) >= torch.tensor([[0], [4], [19]])
    inputs = draw(3, 40, 2, 32, 3, dtype=torch.float64, document_ids=ids, mask=mask)
    rows, features, state = torch.tensor([2, 0, 0, 1]), directions(), ops.WindowState()
    call(inputs, slice(0, 30), features, state)
    state.reorder(rows)
    assert inputs.document_ids is not None
    picked = Inputs(
        *(x[rows] for x in (inputs.query, inputs.key, inputs.gate)),
        inputs.temperature,
        inputs.grad,
        ids[rows],
        mask[rows],
    )
    out = torch.cat([call(picked, some, features, state) for some in (slice(30, 31), slice(31, 40))], 1)
    torch.testing.assert_close(out, loops(inputs, features)[rows, 30:], rtol=1e-11, atol=1e-12)
    ops.WindowState().reorder(rows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_gates(dtype: torch.dtype) -> None:
    """The sums stay float32: a thousand tokens later a step is as exact as its own rounding."""
    inputs = draw(1, 1000, 2, 32, 3, dtype=dtype, key_dtype=torch.float32, temperature=1.0)
    features = directions()
    assert features is not None
    out = continued(inputs, [900] + [1] * 100, features.float())
    wide = ops.aggregate_gates(*(x.double() for x in inputs.differentiable), window=W, features=features)
    assert out.dtype == dtype
    error = (out[:, -100:].double() - wide[:, -100:]).norm() / wide[:, -100:].norm()
    assert error <= torch.finfo(dtype).eps


def test_temperature_100_from_a_state() -> None:
    inputs = draw(1, 60, 2, 32, 3, temperature=100.0)
    features = directions()
    assert features is not None
    exact = definition(*(x.double() for x in inputs.differentiable), features, W)
    for cuts in ([1] * 60, [20, 20, 20]):
        out = continued(inputs, cuts, features.float())
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-3)


def test_a_state_is_for_inference_and_for_one_batch() -> None:
    inputs, features = draw(2, 20, 2, 32, 3, dtype=torch.float64), directions()
    leaf = Inputs(inputs.query, inputs.key.clone().requires_grad_(), inputs.gate, inputs.temperature, inputs.grad)
    with pytest.raises(ValueError, match=r"torch\.no_grad"):
        call(leaf, slice(0, 3), features, ops.WindowState())
    state = ops.WindowState()
    call(inputs, slice(0, 3), features, state)
    other = draw(3, 20, 2, 32, 3, dtype=torch.float64)
    for odd, kind, window in ((other, features, W), (inputs, None, W), (inputs, features, W + 1)):
        with pytest.raises(ValueError, match="start a new state"):
            call(odd, slice(3, 5), kind, state, window=window)


def test_padding_leaves_the_sums_alone() -> None:
    """A block of padding behind real tokens is no document that would end theirs."""
    sums = Sums.empty(1, 1, 2, 3, torch.float64, torch.device("cpu"))
    keys, gates = torch.randn(1, 1, 4, 2).double(), torch.randn(1, 4, 1, 3).double()
    real = sums.absorb(keys, gates, torch.zeros(1, 4).long())
    padded = real.absorb(keys, gates, torch.full((1, 4), torch.iinfo(torch.long).min))
    for before, after in zip(real, padded, strict=True):
        assert torch.equal(before, after)
    other = real.absorb(keys, gates, torch.ones(1, 4).long())
    torch.testing.assert_close(other.gates, real.gates)  # a new document: the old one's sums are gone
    assert other.document == 1

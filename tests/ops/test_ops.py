"""What every implementation of the gate averaging promises: each is judged by being in `IMPLS`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tangolm import ops
from tangolm.ops.compare import Inputs, compare, draw, run
from tests.ops.small import EVERY, implementation

implementations = pytest.mark.parametrize("impl", EVERY)


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory that was never written is NaN, so that reading it shows."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before


def assert_equal(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], tolerance: float = 1e-5) -> None:
    assert len(ours) == len(theirs) == 5
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        scale = float(b.abs().max()) or 1.0
        worst = float((a.double() - b.double()).abs().max())
        assert worst <= tolerance * scale, f"output {index}: {worst} of {scale}"


# (batch, tokens, sources, heads, key width, gate width)
SHAPES = [
    (2, 1, 1, 2, 8, 63),
    (1, 2, 2, 1, 8, 65),
    (3, 7, 7, 2, 8, 63),
    (2, 8, 8, 3, 8, 65),
    (1, 9, 9, 2, 8, 63),
    (2, 17, 17, 2, 8, 5),
    (1, 1, 9, 2, 8, 65),
    (2, 9, 20, 2, 8, 63),
    (2, 40, 75, 3, 8, 16),
    (1, 64, 64, 2, 32, 65),
    (3, 65, 65, 1, 8, 16),
    (1, 257, 257, 2, 8, 16),
]


@implementations
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.case(15)
def test_equals_the_reference(impl: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, tokens, sources, heads, key_width, gate_width = shape
    inputs = draw(batch, tokens, heads, key_width, gate_width, sources=sources, dtype=dtype)
    comparison = compare(implementation(impl), inputs)
    assert comparison.passed, f"\n{comparison}"


@pytest.mark.parametrize("tokens", [1030, 2050])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_sequences(tokens: int, dtype: torch.dtype) -> None:
    """More than one strip of the backward, and blocks of the size that long sequences take."""
    comparison = compare("chunked", draw(1, tokens, 1, 8, 16, sources=tokens + 3, dtype=dtype), orders=2)
    assert comparison.passed, f"\n{comparison}"


@implementations
@pytest.mark.parametrize("gates", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("keys", [torch.float16, torch.float32], ids=str)
def test_mixed_dtypes(impl: str, gates: torch.dtype, keys: torch.dtype) -> None:
    """Queries and keys in another dtype than the gates, as autocast gives them."""
    inputs = draw(2, 20, 2, 8, 16, dtype=gates, key_dtype=keys)
    assert [tensor.dtype for tensor in run(implementation(impl), inputs)] == [
        gates,
        keys,
        keys,
        gates,
        inputs.temperature.dtype,
    ]
    comparison = compare(implementation(impl), inputs)
    assert comparison.passed, f"\n{comparison}"


@implementations
@pytest.mark.parametrize("temperature", [1e-6, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.case(17)
def test_extreme_temperatures(impl: str, temperature: float, dtype: torch.dtype) -> None:
    inputs = draw(2, 20, 2, 8, 16, dtype=dtype, temperature=temperature)
    inputs.key[:, 0] = -inputs.query[:, 0]  # the first token's own score is -temperature
    results = run(implementation(impl), inputs)
    assert all(tensor.isfinite().all() for tensor in results)
    if dtype != torch.float16 or temperature > 1:  # gradients of 1e-6 are below float16's normal numbers
        comparison = compare(implementation(impl), inputs)
        assert comparison.passed, f"\n{comparison}"
    unit = Inputs(inputs.query, inputs.key, torch.ones_like(inputs.gate), inputs.temperature, inputs.grad)
    ones = run(implementation(impl), unit)[0]
    assert (ones.float() - 1).abs().max() <= 4 * torch.finfo(dtype).eps, "weights do not sum to 1"
    if temperature < 1:
        plain = inputs.gate.float().cumsum(1) / torch.arange(1, 21)[:, None, None]
        assert (results[0].float() - plain).abs().max() <= 4 * torch.finfo(dtype).eps * plain.abs().max()


@implementations
@pytest.mark.case(16)
def test_expanded_sliced_and_transposed(impl: str) -> None:
    function = implementation(impl)
    inputs = draw(2, 20, 2, 8, 16)
    one = torch.ones(()).expand_as(inputs.grad)
    expected = run(function, Inputs(*inputs.differentiable, torch.ones_like(inputs.grad)))
    assert_equal(run(function, Inputs(*inputs.differentiable, one)), expected)

    def sliced(x: Tensor) -> Tensor:
        return torch.stack([x, x + 1], -1).repeat_interleave(2, 1)[:, ::2, ..., 0]

    def transposed(x: Tensor) -> Tensor:
        return x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)

    def head_major(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    expected = run(function, inputs)
    for view in (sliced, transposed, head_major):
        query, key, gate, grad = (view(x) for x in (inputs.query, inputs.key, inputs.gate, inputs.grad))
        assert torch.equal(gate, inputs.gate)
        assert_equal(run(function, Inputs(query, key, gate, inputs.temperature, grad)), expected)


@implementations
@pytest.mark.parametrize(("tokens", "sources"), [(2, 2), (11, 11), (9, 13)])
def test_gradients_in_float64(impl: str, tokens: int, sources: int) -> None:
    ids, mask = _packed(2, sources)
    inputs = draw(2, tokens, 1, 2, 2, sources=sources, dtype=torch.float64, temperature=3.0)
    for document_ids, real in ((None, None), (ids, None), (ids, mask)):
        leaves = [tensor.detach().requires_grad_() for tensor in inputs.differentiable]
        assert torch.autograd.gradcheck(lambda *x, d=document_ids, m=real: implementation(impl)(*x, d, m), leaves)


@implementations
def test_causality(impl: str) -> None:
    inputs = draw(1, 20, 2, 8, 16)
    function = implementation(impl)
    before = function(*inputs.differentiable, None, None)
    for token in (0, 7, 8, 19):
        key, gate = inputs.key.clone(), inputs.gate.clone()
        key[:, token] *= -1
        gate[:, token] += 1
        after = function(inputs.query, key, gate, inputs.temperature, None, None)
        assert torch.equal(after[:, :token], before[:, :token])
        assert (after[:, token:] != before[:, token:]).flatten(2).any(-1).all()


@implementations
@pytest.mark.case(5)
def test_documents_equal_separate_runs(impl: str) -> None:
    lengths = (5, 1, 21)
    inputs = draw(2, sum(lengths), 2, 8, 16)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).expand(2, -1)
    packed = run(implementation(impl), Inputs(*inputs.differentiable, inputs.grad, ids))
    parts, start = [], 0
    for length in lengths:
        piece = slice(start, start + length)
        query, key, gate, grad = (x[:, piece] for x in (inputs.query, inputs.key, inputs.gate, inputs.grad))
        parts.append(run(implementation(impl), Inputs(query, key, gate, inputs.temperature, grad)))
        start += length
    separate = [torch.cat(tensors, 1) for tensors in list(zip(*parts, strict=True))[:4]]
    assert_equal(packed, (*separate, sum(part[4] for part in parts)))


@implementations
@pytest.mark.case(3)
def test_padding_equals_removed_tokens(impl: str) -> None:
    inputs = draw(1, 30, 2, 8, 16)
    mask = torch.ones(1, 30, dtype=torch.bool)
    mask[:, :5] = mask[:, 17:20] = mask[:, 29] = False
    masked = run(implementation(impl), Inputs(*inputs.differentiable, inputs.grad, None, mask))
    query, key, gate, grad = (x[:, mask[0]] for x in (inputs.query, inputs.key, inputs.gate, inputs.grad))
    short = run(implementation(impl), Inputs(query, key, gate, inputs.temperature, grad))
    assert_equal((*(tensor[:, mask[0]] for tensor in masked[:4]), masked[4]), short)
    for tensor in masked[:4]:
        assert torch.equal(tensor[:, ~mask[0]], torch.zeros_like(tensor[:, ~mask[0]]))


@implementations
@pytest.mark.case(4)
def test_a_row_of_padding_only_gives_zeros(impl: str) -> None:
    inputs = draw(3, 10, 2, 8, 16)
    mask = torch.ones(3, 10, dtype=torch.bool)
    mask[1] = False
    masked = run(implementation(impl), Inputs(*inputs.differentiable, inputs.grad, None, mask))
    plain = run(implementation(impl), inputs)
    for ours, theirs in zip(masked[:4], plain[:4], strict=True):
        assert ours[1].abs().max() == 0
        assert torch.allclose(ours[[0, 2]], theirs[[0, 2]], atol=1e-6)
    assert masked[4].isfinite().all()


@pytest.mark.parametrize("impl", tuple(ops.IMPLS))
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.case(8)
def test_pieces_with_a_state_equal_the_whole(impl: str, packed: bool) -> None:
    inputs = draw(2, 90, 2, 8, 16)
    ids, mask = _packed(2, 90) if packed else (None, None)
    tensors = inputs.query, inputs.key, inputs.gate
    whole = ops.aggregate_gates(*tensors, inputs.temperature, document_ids=ids, mask=mask, impl=impl)
    state, start, pieces = ops.Sources(), 0, []
    for length in (10, 3, 1, 1, 70, 5):
        part = slice(start, start + length)
        pieces.append(
            ops.aggregate_gates(
                *(x[:, part] for x in tensors),
                inputs.temperature,
                document_ids=None if ids is None else ids[:, part],
                mask=None if mask is None else mask[:, part],
                state=state,
                impl=impl,
            )
        )
        start += length
    assert start == state.length == 90
    assert torch.allclose(torch.cat(pieces, 1), whole, atol=1e-5)


@pytest.mark.parametrize("impl", tuple(ops.IMPLS))
@pytest.mark.parametrize("packed", [False, True])
def test_compiled_equals_eager(impl: str, packed: bool) -> None:
    inputs = draw(2, 70, 2, 8, 16)
    ids, mask = _packed(2, 70) if packed else (None, None)

    def call(query: Tensor, key: Tensor, gate: Tensor, temperature: Tensor, ids: Tensor | None, mask: Tensor | None):
        return ops.aggregate_gates(query, key, 2 * gate, temperature, document_ids=ids, mask=mask, impl=impl)

    inputs = Inputs(*inputs.differentiable, inputs.grad, ids, mask)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert_equal(run(compiled, inputs), run(call, inputs), 1e-6)


@pytest.mark.parametrize("impl", tuple(ops.IMPLS))
def test_under_autocast(impl: str) -> None:
    """Scores stay in float32, and the backward may run inside the region too."""
    inputs = draw(2, 20, 2, 8, 16, key_dtype=torch.float32, dtype=torch.bfloat16)
    plain = run(ops.IMPLS[impl], inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal(run(ops.IMPLS[impl], inputs), plain, 0.0 if impl == "chunked" else 1e-2)


@pytest.mark.parametrize("impl", tuple(ops.IMPLS))
def test_counted_operations(impl: str) -> None:
    inputs = draw(2, 70, 3, 8, 16, sources=75)
    pairs = 2 * 3 * 70 * 75
    with FlopCounterMode(display=False) as counter:
        ops.IMPLS[impl](*inputs.differentiable, None, None)
    assert counter.get_total_flops() == 2 * pairs * (8 + 16)
    with FlopCounterMode(display=False) as counter:
        run(ops.IMPLS[impl], inputs)
    assert counter.get_total_flops() == 3 * 2 * pairs * (8 + 16)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_documents_and_padding(data: st.DataObject) -> None:
    """Blocked with small tiles equals the reference in float64, whatever is hidden from whom."""
    batch = data.draw(st.integers(1, 3), "batch")
    sources = data.draw(st.integers(2, 40), "sources")
    tokens = data.draw(st.integers(2, sources), "tokens")
    heads = data.draw(st.integers(1, 3), "heads")
    bits = st.lists(st.booleans(), min_size=batch * sources, max_size=batch * sources)
    starts = data.draw(st.none() | bits, "document starts")
    real = data.draw(st.none() | bits, "real tokens")
    inputs = draw(
        batch,
        tokens,
        heads,
        3,
        4,
        sources=sources,
        dtype=torch.float64,
        temperature=3.0,
        document_ids=None if starts is None else torch.tensor(starts).view(batch, sources).long().cumsum(1),
        mask=None if real is None else torch.tensor(real).view(batch, sources),
    )
    for impl in EVERY:
        assert_equal(run(implementation(impl), inputs), run(ops.IMPLS["reference"], inputs), 1e-10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"document_ids": torch.tensor([[0, 1, 1, 0]])}, "document_ids must not decrease"),
        ({"document_ids": torch.zeros(1, 5, dtype=torch.long)}, r"document_ids must be \[1, 4\], got \(1, 5\)"),
        ({"document_ids": torch.zeros(1, 4)}, "document_ids must be whole numbers, got torch.float32"),
        ({"mask": torch.ones(1, 3, dtype=torch.bool)}, r"mask must be \[1, 4\], got \(1, 3\)"),
        ({"mask": torch.ones(1, 4)}, "mask must be boolean"),
        ({"query": torch.ones(4, 2, 8)}, r"query must be \[B, T, H, D\], got \(4, 2, 8\)"),
        ({"key": torch.ones(1, 4, 2, 9)}, r"key must have the shape of query \(1, 4, 2, 8\), got \(1, 4, 2, 9\)"),
        ({"gate": torch.ones(1, 5, 2, 8)}, r"gate must be \[1, 4, 2, E\], got \(1, 5, 2, 8\)"),
        ({"temperature": torch.ones(3)}, r"temperature must be \[2\], one a head, got \(3,\)"),
        ({"impl": "chonked"}, "impl 'chonked' is not known.*chunked"),
    ],
)
@pytest.mark.case(6)
def test_refused(change: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any work: no implementation is reached."""
    inputs = draw(1, 4, 2, 8, 16)
    arguments: dict[str, object] = dict(
        zip(("query", "key", "gate", "temperature"), inputs.differentiable, strict=True)
    )
    for name in ops.IMPLS:
        monkeypatch.setitem(ops.IMPLS, name, lambda *_: pytest.fail("work was begun"))
    with pytest.raises(ValueError, match=message) as caught:
        ops.aggregate_gates(**(arguments | change))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def _packed(batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Documents of about ten tokens that begin elsewhere in each row, and padding on both sides of the middle."""
    generator = torch.Generator().manual_seed(3)
    ids = (torch.rand(batch, tokens, generator=generator) < 0.1).long().cumsum(1)
    mask = torch.rand(batch, tokens, generator=generator) < 0.8
    mask[0, : tokens // 3] = False
    return ids, mask


@pytest.mark.parametrize("shape", [(1, 0, 2, 4), (1, 3, 0, 4), (1, 3, 2, 0)])
def test_empty_shapes_are_refused(shape: tuple[int, ...]) -> None:
    query = torch.zeros(shape)
    with pytest.raises(ValueError, match="at least 1"):
        ops.aggregate_gates(query, query, torch.zeros(*shape[:3], 5), torch.ones(shape[2]))


def test_whole_numbers_are_refused() -> None:
    query = torch.zeros(1, 3, 2, 4)
    with pytest.raises(ValueError, match=r"gate must be floating point, got torch\.int64"):
        ops.aggregate_gates(query, query, torch.zeros(1, 3, 2, 5).long(), torch.ones(2))

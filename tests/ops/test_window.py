"""Windowed averaging: every form against the loops that define it, at every boundary of blocks of W 8."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tangolm import ops
from tangolm.ops import window_tiles
from tangolm.ops.compare import Inputs, draw
from tangolm.ops.features import random_directions
from tangolm.ops.window import definition
from tangolm.ops.window_tiles import WindowTiles

W = 8
LENGTHS = [1, 2, W - 1, W, W + 1, 2 * W - 1, 2 * W, 2 * W + 1, 3 * W + 1, 4 * W + 3]
WIDTH = 32
forms = pytest.mark.parametrize("impl", [*ops.WINDOWED, "chunked, small segments"])
with_features = pytest.mark.parametrize("far", [True, False], ids=["features", "no features"])


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


@pytest.fixture
def name(impl: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The implementation's name; with one block, and a head a thread instead of whole rows, at a time where segments are small."""
    if impl in ops.WINDOWED:
        return impl
    monkeypatch.setattr(window_tiles, "CACHE", 1)
    monkeypatch.setattr(window_tiles, "ROWS", 1)
    return "chunked"


def directions(heads: int = 2, count: int = 32, width: int = WIDTH) -> Tensor:
    return random_directions(heads, count, width, torch.Generator().manual_seed(5)).double()


def windowed(name: str, inputs: Inputs, features: Tensor | None, window: int = W) -> Tensor:
    """By the form itself, at whatever length."""
    return ops.windowed.aggregate_gates(
        ops.WINDOWED[name], *inputs.differentiable, features, window, inputs.document_ids, inputs.mask
    )


def loops(_: str, inputs: Inputs, features: Tensor | None, window: int = W) -> Tensor:
    return definition(*inputs.differentiable, features, window, inputs.document_ids, inputs.mask)


def outputs(function, name: str, inputs: Inputs, features: Tensor | None, window: int = W) -> list[Tensor]:
    """The averages and every gradient."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs.differentiable]
    own = Inputs(*leaves, inputs.grad, inputs.document_ids, inputs.mask)
    out = function(name, own, features, window)
    out.backward(inputs.grad)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def assert_equal(ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    assert len(ours) == len(theirs) == 5
    for label, a, b in zip(("average", "query", "key", "gate", "temperature"), ours, theirs, strict=True):
        worst = (a.double() - b.double()).abs().max().item()
        # A lone source has no gradient in its score: what rounding leaves is measured against one.
        scale = b.abs().max().item() or 1.0
        assert worst <= tolerance * max(scale, 1e-3), f"{label}: {worst} of {scale}"


def documents(tokens: int) -> Tensor:
    """Two rows; boundaries inside blocks and on them, documents of one token, of more than two blocks."""
    first = torch.tensor([3] + [4] * 4 + [7] * 3 + [8] * 19 + [9] * 40)[:tokens]
    return torch.stack([first, torch.arange(tokens) // 26])


@forms
@with_features
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("packed", [False, True])
def test_blockwise_equals_loops(name: str, far: bool, tokens: int, packed: bool) -> None:
    inputs = draw(2, tokens, 2, WIDTH, 3, dtype=torch.float64, document_ids=documents(tokens) if packed else None)
    features = directions() if far else None
    ours, theirs = (outputs(function, name, inputs, features) for function in (windowed, loops))
    assert_equal(ours, theirs, 1e-11)


@forms
@pytest.mark.parametrize("window", [1, 2, 3, 5, 12])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_other_windows_and_feature_counts(name: str, window: int, count: int) -> None:
    inputs = draw(1, 29, 2, WIDTH, 3, dtype=torch.float64)
    features = directions(count=count)
    ours, theirs = (outputs(function, name, inputs, features, window) for function in (windowed, loops))
    assert_equal(ours, theirs, 1e-11)


@forms
def test_far_sources_matter(name: str) -> None:
    """The comparisons above would pass without far sources if these did nothing."""
    inputs = draw(1, 40, 2, WIDTH, 3, dtype=torch.float64, temperature=1.0)
    near, all_sources = (windowed(name, inputs, features) for features in (None, directions()))
    assert torch.allclose(near[:, :W], all_sources[:, :W])
    assert ((near[:, W:] - all_sources[:, W:]).abs().amax((0, 2, 3)) > 1e-3).all()


@forms
@with_features
@pytest.mark.case(10)
@pytest.mark.parametrize("window", [16, 21])
def test_a_window_of_all_tokens_is_the_full_average(name: str, far: bool, window: int) -> None:
    """With window == T and T + 5: by the form itself, and through the facade bit for bit."""
    features = directions() if far else None
    inputs = draw(2, 16, 2, WIDTH, 3, dtype=torch.float64)
    full = ops.aggregate_gates(*inputs.differentiable, impl=name)
    torch.testing.assert_close(windowed(name, inputs, features, window), full, rtol=1e-12, atol=1e-13)
    assert torch.equal(ops.aggregate_gates(*inputs.differentiable, window=window, features=features, impl=name), full)


@forms
@pytest.mark.case(9)
def test_reach_of_a_window_without_features(name: str) -> None:
    """Bit for bit: token i - 8 is out of reach of destination i, token i - 7 is within."""
    inputs = draw(1, 30, 2, WIDTH, 3)
    before = windowed(name, inputs, None)
    for j in (0, 7, 8, 13):
        changed = Inputs(*(x.clone() for x in (inputs.query, inputs.key, inputs.gate)), inputs.temperature, inputs.grad)
        changed.gate[:, j] += 1
        changed.key[:, j] *= -1
        moved = (windowed(name, changed, None) != before).any(-1).all(-1)[0]
        assert moved.nonzero().flatten().tolist() == list(range(j, min(j + W, 30)))


@forms
@with_features
def test_no_later_token_is_seen(name: str, far: bool) -> None:
    inputs = draw(1, 40, 2, WIDTH, 3)
    features = directions().float() if far else None
    before = windowed(name, inputs, features)
    for j in (1, 8, 17, 39):
        key, gate = inputs.key.clone(), inputs.gate.clone()
        key[:, j:], gate[:, j:] = -key[:, j:].roll(1, -1), 50.0
        after = windowed(name, Inputs(inputs.query, key, gate, inputs.temperature, inputs.grad), features)
        assert torch.equal(after[:, :j], before[:, :j])
        assert (after[:, j] != before[:, j]).all()


@forms
@with_features
@pytest.mark.parametrize("holes", [False, True])
def test_padding_equals_loops_and_none(name: str, far: bool, holes: bool) -> None:
    """Padding left, right and (holes) anywhere: neither source nor destination, and not counted by the window."""
    features, generator = directions() if far else None, torch.Generator().manual_seed(2)
    mask = torch.ones(4, 45, dtype=torch.bool)
    mask[0, :13] = False
    mask[1, 30:] = False
    mask[2] = False
    if holes:
        mask &= torch.rand(4, 45, generator=generator) < 0.7
    ids = torch.arange(45).expand(4, -1) // 31
    for document_ids in (None, ids):
        inputs = draw(4, 45, 2, WIDTH, 3, dtype=torch.float64, mask=mask, document_ids=document_ids)
        ours, theirs = (outputs(function, name, inputs, features) for function in (windowed, loops))
        assert_equal(ours, theirs, 1e-11)
        assert (ours[0][~mask] == 0).all()
        assert all((gradient[~mask] == 0).all() for gradient in ours[1:4]), "padding has a gradient"
        for row in (0, 1, 3):
            real = mask[row]
            alone = draw(1, int(real.sum()), 2, WIDTH, 3, dtype=torch.float64)
            parts = [x[row : row + 1, real] for x in (inputs.query, inputs.key, inputs.gate)]
            own = None if document_ids is None else document_ids[row : row + 1, real]
            unpadded = windowed(name, Inputs(*parts, inputs.temperature, alone.grad, own), features)
            torch.testing.assert_close(ours[0][row, real], unpadded[0], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "documents"])
def test_rows_worked_on_together_equal_rows_apart(rows: int, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group is heads of one batch row, or whole rows; documents end elsewhere in each."""
    features, ids = directions(), None
    inputs = draw(5, 2 * W + 3, 2, WIDTH, 3, dtype=torch.float64)
    if packed:
        ids = torch.stack([(torch.arange(2 * W + 3) >= end).long() for end in (0, 3, W, W + 1, 2 * W)])
    inputs = Inputs(*inputs.differentiable, inputs.grad, ids)
    monkeypatch.setattr(window_tiles, "ROWS", rows * 2 * 3 * 4 * 64)  # as many rows of sums
    tiles = WindowTiles(inputs.query, inputs.key, 3, inputs.temperature, features, W, ids)
    groups = list(tiles.groups())
    assert [lane for group in groups for lane in range(group.start, group.stop)] == list(range(10))
    assert len(groups) == -(-5 // rows) or (rows == 1 and len(groups) >= 5)
    assert_equal(outputs(windowed, "chunked", inputs, features), outputs(loops, "", inputs, features), 1e-11)


@forms
@with_features
def test_packed_documents_equal_separate_ones(name: str, far: bool) -> None:
    features = directions() if far else None
    lengths = [5, 1, 21, 8, 16, 33]
    inputs = draw(1, sum(lengths), 2, WIDTH, 3, dtype=torch.float64)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    packed = outputs(windowed, name, Inputs(*inputs.differentiable, inputs.grad, ids), features)
    parts = [x.split(lengths, 1) for x in (inputs.query, inputs.key, inputs.gate, inputs.grad)]
    separate = [
        outputs(windowed, name, Inputs(q, k, g, inputs.temperature, grad), features)
        for q, k, g, grad in zip(*parts, strict=True)
    ]
    joined = [torch.cat([part[i] for part in separate], 1) for i in range(4)]
    assert_equal(packed, [*joined, torch.stack([part[4] for part in separate]).sum(0)], 1e-11)


@pytest.mark.parametrize("tokens", [W + 1, 3 * W + 2])
@with_features
def test_gradients_by_differences(tokens: int, far: bool) -> None:
    inputs = draw(1, tokens, 1, 4, 2, dtype=torch.float64, temperature=3.0)
    features, ids = directions(1, 3, 4) if far else None, (torch.arange(tokens) // (2 * W + 1))[None]
    leaves = [tensor.clone().requires_grad_() for tensor in inputs.differentiable]

    def function(*operands: Tensor) -> Tensor:
        return torch.ops.tangolm.aggregate_gates_windowed(*operands, features, ids, W)

    assert torch.autograd.gradcheck(function, leaves)


@forms
@pytest.mark.case(16)
def test_expanded_and_transposed_operands(name: str) -> None:
    inputs, features = draw(2, 29, 2, WIDTH, 4, dtype=torch.float64), directions()
    leaves = [tensor.clone().requires_grad_() for tensor in inputs.differentiable]
    windowed(name, Inputs(*leaves, inputs.grad), features).sum().backward()
    contiguous = outputs(windowed, name, Inputs(*inputs.differentiable, torch.ones_like(inputs.grad)), features)
    odd = [tensor.transpose(1, 3).contiguous().transpose(1, 3).requires_grad_() for tensor in leaves[:3]]
    odd = [tensor.detach().requires_grad_() for tensor in odd]
    out = windowed(name, Inputs(*odd, inputs.temperature, inputs.grad), features)
    out.sum().backward()
    for a, b, c in zip(leaves[:3], odd, contiguous[1:4], strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad, c)
        torch.testing.assert_close(b.grad, c)


@forms
@pytest.mark.case(17)
@pytest.mark.parametrize("temperature", [1e-6, 100.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_extreme_temperatures(name: str, temperature: float, dtype: torch.dtype) -> None:
    """Finite, gradients too; the weights sum to 1; also where every source is opposite, and where it is the same."""
    features = directions().float()
    for arrangement in ("random", "opposite", "along a direction"):
        drawn = draw(1, 4 * W + 3, 2, WIDTH, 3, dtype=dtype, key_dtype=torch.float32)
        query, key = drawn.query.clone(), drawn.key.clone()
        if arrangement == "opposite":
            key = -query[:, :1].expand_as(query)
            query = query[:, :1].expand_as(query)
        elif arrangement == "along a direction":
            # The longest features there are: far weights of e^(|w|^2 / 2), next to near ones of e^-tau.
            key = torch.nn.functional.normalize(features[:, 0], dim=-1).expand_as(key)
            query = torch.cat([key[:, : 2 * W], -key[:, 2 * W :]], 1)
        gate = torch.cat([torch.ones_like(drawn.gate[..., :1]), drawn.gate[..., 1:]], -1)
        inputs = Inputs(query, key, gate, torch.full((2,), temperature), drawn.grad)
        found = outputs(windowed, name, inputs, features)
        assert all(tensor.isfinite().all() for tensor in found)
        tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
        torch.testing.assert_close(found[0][..., 0].float(), torch.ones(1, 4 * W + 3, 2), atol=tolerance, rtol=0)


@forms
@pytest.mark.parametrize("temperature", [0.5, 12.0, 100.0])
def test_float32_is_as_exact_as_the_scores(name: str, temperature: float) -> None:
    """Scores and features are rounded at tau 2^-24; nothing more is lost by the offsets of the exponentials."""
    inputs = draw(2, 75, 2, WIDTH, 3, dtype=torch.float32, temperature=temperature)
    exact = loops("", Inputs(*(x.double() for x in inputs.differentiable), inputs.grad.double()), directions())
    worst = (windowed(name, inputs, directions().float()).double() - exact).abs().max().item()
    assert worst < 4 * temperature * 2**-24 * 8 + 1e-6


@forms
def test_a_quiet_beginning_is_not_lost(name: str) -> None:
    """Keys that raise the offsets of the sums late: earlier sources, far smaller in every feature, still count."""
    features = directions(1)
    inputs = draw(1, 60, 1, WIDTH, 3, dtype=torch.float32, temperature=60.0)
    loud = torch.nn.functional.normalize(features[:, 1], dim=-1).float()
    key = inputs.key.clone()
    key[:, 40:] = loud
    query = -loud.expand_as(inputs.query)
    narrow = Inputs(query, key, inputs.gate, torch.full((1,), 60.0), inputs.grad)
    exact = loops("", Inputs(*(x.double() for x in narrow.differentiable), inputs.grad.double()), features)
    ours = windowed(name, narrow, features.float())
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@with_features
def test_narrow_gates(dtype: torch.dtype, far: bool) -> None:
    """Sums and products are formed in float32 and rounded once: as near as that rounding lets the result be."""
    features = directions() if far else None
    inputs = draw(2, 75, 2, WIDTH, 3, dtype=dtype, key_dtype=torch.float32)
    ours = outputs(windowed, "chunked", inputs, None if features is None else features.float())
    exact = outputs(loops, "", Inputs(*(x.double() for x in inputs.differentiable), inputs.grad.double()), features)
    eps = torch.finfo(dtype).eps
    for index, (a, b) in enumerate(zip(ours, exact, strict=True)):
        bound = eps if index in (0, 3) else 1e-4  # other gradients are not rounded to the gate's dtype
        assert (a.double() - b).norm() <= bound * b.norm(), index
    assert ours[0].dtype == ours[3].dtype == dtype


def test_operators_are_what_torch_expects() -> None:
    """Schema, shape rules, autograd and compilation, by torch's own check."""
    ids = torch.arange(20).expand(2, -1) // 13
    inputs = draw(2, 20, 2, WIDTH, 4, dtype=torch.float64)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs.differentiable]
    for features, documents_or_none in ((directions(), None), (directions(), ids), (None, ids)):
        rest = (features, documents_or_none, 4)
        torch.library.opcheck(torch.ops.tangolm.aggregate_gates_windowed, (*leaves, *rest))
        gradient = torch.ops.tangolm.aggregate_gates_windowed_backward
        torch.library.opcheck(gradient, (inputs.grad, *inputs.differentiable, *rest))


def test_no_second_derivative() -> None:
    inputs = draw(1, 20, 2, WIDTH, 2)
    query = inputs.query.clone().requires_grad_()
    average = windowed("chunked", Inputs(query, *inputs.differentiable[1:], inputs.grad), directions().float())
    (grad,) = torch.autograd.grad(average.sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match="impl='reference'"):
        grad.sum().backward()


@with_features
def test_counted_operations(far: bool) -> None:
    """The blockwise form multiplies 2W (D + E) a destination and 2mE a token: reference and operator say the same."""
    inputs, features = draw(2, 6 * W, 2, WIDTH, 5), directions().float() if far else None
    counts = []
    for name in ops.WINDOWED:
        with FlopCounterMode(display=False) as counter:
            windowed(name, inputs, features)
        counts.append(counter.get_total_flops())
    tokens = 2 * 6 * W * 2
    assert counts == [2 * tokens * (2 * W * (WIDTH + 5) + (2 * 64 * 5 if far else 0))] * len(ops.WINDOWED)


def test_forms_have_the_names_of_the_full_ones() -> None:
    assert list(ops.WINDOWED) == list(ops.IMPLS)


def test_memory_is_linear_in_the_tokens() -> None:
    """Beside the averages and the gradient of the gates, less than one more gate matrix; peak of a fresh process."""
    program = """
import sys, torch
from tangolm.ops import aggregate_gates
from tangolm.ops.features import random_directions
torch.set_num_threads(1)
def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
def case(tokens):
    unit = torch.nn.functional.normalize(torch.randn(2, 1, tokens, 2, 32), dim=-1)
    leaves = [*unit.unbind(0), torch.randn(1, tokens, 2, 1780), torch.full((2,), 12.0)]
    return [leaf.requires_grad_() for leaf in leaves], torch.randn(1, tokens, 2, 1780)
features = random_directions(2, 32, 32, None)
small, large = case(256), case(4096)
def step(leaves, grad):
    aggregate_gates(*leaves, window=64, features=features).backward(grad)
step(*small)
before = peak()
step(*large)
print((peak() - before) / (4096 * 2 * 1780 * 4))
"""
    if not sys.platform.startswith("linux"):
        pytest.skip("reads the peak from /proc")
    ratio = float(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout)
    assert 1.9 < ratio < 3, "two gate matrices are the results themselves"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"features": torch.zeros(2, 3, WIDTH)}, "features need a window"),
        (
            {"window": 4, "features": torch.zeros(3, 3, WIDTH)},
            r"features must be directions \[2, M, 32\], got \(3, 3, 32\)",
        ),
        ({"window": 4, "state": ops.Sources()}, "state must be a WindowState where window is 4, got a Sources"),
        ({"state": ops.WindowState()}, "state must be a Sources where window is None, got a WindowState"),
        ({"window": 4, "impl": "blocked"}, "impl 'blocked' is not known"),
    ],
)
def test_what_does_not_fit_is_named(arguments: dict, message: str) -> None:
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        ops.aggregate_gates(*draw(1, 9, 2, WIDTH, 3).differentiable, **arguments)

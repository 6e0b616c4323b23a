"""The judge of every implementation: relative RMS error against the reference run in float64, forward and each gradient.

    error(x) = |x - x64| / |x64|        pass: error(x) <= multiple * (1 + 4 / sqrt(n)) * reference error + eps / 4

The reference's own error in the same dtype says what that dtype allows. It is the RMS over several orders of the channels,
which mean the same and round differently. Errors of one destination go together, so n is the number of destinations (of
heads for the temperature): where there are few, the reference may have been lucky. In float64 the oracle rounds as well,
and 1e-12 is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tangolm import ops
from tangolm.ops import reference

Implementation = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
NAMES = ("average", "grad query", "grad key", "grad gate", "grad temperature")


@dataclass(frozen=True)
class Inputs:
    """What an implementation is given, and the gradient that arrives at its output."""

    query: Float[Tensor, "B T H D"]
    key: Float[Tensor, "B S H D"]
    gate: Float[Tensor, "B S H E"]
    temperature: Float[Tensor, "H"]
    grad: Float[Tensor, "B T H E"]
    document_ids: Int[Tensor, "B S"] | None = None
    mask: Bool[Tensor, "B S"] | None = None

    @property
    def differentiable(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.query, self.key, self.gate, self.temperature


@dataclass(frozen=True)
class Error:
    """Of one tensor: relative RMS error of the implementation and of the reference, and what is allowed."""

    name: str
    error: float
    reference: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit  # False for NaN


@dataclass(frozen=True)
class Comparison:
    """The errors of an implementation on some inputs, in the order of `NAMES`."""

    errors: tuple[Error, ...]

    @property
    def passed(self) -> bool:
        return bool(self.errors) and all(error.passed for error in self.errors)

    def __str__(self) -> str:
        return "\n".join(
            f"{e.name:<17} error {e.error:.2e}  reference {e.reference:.2e}  allowed {e.limit:.2e}"
            + ("" if e.passed else "  TOO LARGE")
            for e in self.errors
        )


def draw(
    batch: int,
    tokens: int,
    heads: int,
    key_width: int,
    gate_width: int,
    *,
    sources: int | None = None,
    dtype: torch.dtype = torch.float32,
    key_dtype: torch.dtype | None = None,
    temperature: float = 12.0,
    document_ids: Tensor | None = None,
    mask: Tensor | None = None,
    seed: int = 0,
) -> Inputs:
    """Random inputs: unit queries and keys, gates with a mean, temperatures around `temperature`.

    Args:
        batch, tokens, heads, key_width, gate_width: B, T, H, D and E.
        sources: S; None: T.
        dtype: of gates and gradient.
        key_dtype: of queries and keys; None: `dtype`.
        document_ids, mask: [B, S], passed on.
        seed: of the draw.
    """
    generator = torch.Generator().manual_seed(seed)
    sources = tokens if sources is None else sources

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def unit(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(normal(*shape), dim=-1).to(key_dtype or dtype)

    return Inputs(
        query=unit(batch, tokens, heads, key_width),
        key=unit(batch, sources, heads, key_width),
        gate=torch.nn.functional.silu(normal(batch, sources, heads, gate_width)).to(dtype),
        temperature=(temperature * (0.2 * normal(heads)).exp()).to(torch.promote_types(dtype, torch.float32)),
        grad=normal(batch, tokens, heads, gate_width).to(dtype),
        document_ids=document_ids,
        mask=mask,
    )


def compare(impl: str | Implementation, inputs: Inputs, *, multiple: float = 2.0, orders: int = 4) -> Comparison:
    """Judge an implementation on some inputs.

    Args:
        impl: "auto", a key of `tangolm.ops.IMPLS`, or a function of the same arguments.
        inputs: what it is given, in the dtype that is judged.
        multiple: how many times the reference's error is allowed.
        orders: of channels, over which the reference's error is taken.

    Returns:
        One error each for the averages and the gradients of query, key, gate and temperature.

    Raises:
        ValueError: an unknown implementation, or one that cannot run here.
    """
    function = ops.IMPLS[ops.choose(impl)] if isinstance(impl, str) else impl
    oracle = run(reference.aggregate_gates, _converted(inputs, torch.float64))
    own = [relative_rms(*pair) for pair in zip(run(function, inputs), oracle, strict=True)]
    squares = [0.0] * len(NAMES)
    for order in range(orders):
        for index, pair in enumerate(zip(_reordered_reference(inputs, order), oracle, strict=True)):
            squares[index] += relative_rms(*pair) ** 2 / orders
    batch, tokens, heads, _ = inputs.query.shape
    errors = []
    for name, error, square, tensor in zip(NAMES, own, squares, (inputs.gate, *inputs.differentiable), strict=True):
        independent = heads if name == "grad temperature" else batch * tokens * heads
        floor = 1e-12 if tensor.dtype == torch.float64 else torch.finfo(tensor.dtype).eps / 4
        limit = multiple * (1 + 4 / math.sqrt(independent)) * math.sqrt(square) + floor
        errors.append(Error(name, error, math.sqrt(square), limit))
    return Comparison(tuple(errors))


def run(impl: Implementation, inputs: Inputs) -> tuple[Tensor, ...]:
    """The averages and the gradients of query, key, gate and temperature."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs.differentiable]
    query, key, gate, temperature = leaves
    average = impl(query, key, gate, temperature, inputs.document_ids, inputs.mask)
    return average.detach(), *torch.autograd.grad(average, leaves, inputs.grad)


def relative_rms(value: Tensor, oracle: Tensor) -> float:
    """|value - oracle| / |oracle| in float64; where the oracle is zero, the RMS of the value."""
    size = float(torch.linalg.vector_norm(oracle.double()))
    error = float(torch.linalg.vector_norm(value.double() - oracle.double()))
    return error / size if size > 0 else error / math.sqrt(max(1, value.numel()))


def _converted(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    tensors = (tensor.to(dtype) for tensor in (*inputs.differentiable, inputs.grad))
    return Inputs(*tensors, document_ids=inputs.document_ids, mask=inputs.mask)


def _reordered_reference(inputs: Inputs, order: int) -> tuple[Tensor, ...]:
    """The reference with its channels in another order, and the results in the old one."""
    generator = torch.Generator().manual_seed(order)
    key_order = torch.randperm(inputs.query.shape[3], generator=generator).to(inputs.query.device)
    gate_order = torch.randperm(inputs.gate.shape[3], generator=generator).to(inputs.gate.device)
    average, query, key, gate, temperature = run(
        reference.aggregate_gates,
        Inputs(
            inputs.query[..., key_order],
            inputs.key[..., key_order],
            inputs.gate[..., gate_order],
            inputs.temperature,
            inputs.grad[..., gate_order],
            inputs.document_ids,
            inputs.mask,
        ),
    )
    key_back, gate_back = key_order.argsort(), gate_order.argsort()
    return average[..., gate_back], query[..., key_back], key[..., key_back], gate[..., gate_back], temperature

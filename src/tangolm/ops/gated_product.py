"""The last step of the TANGO update, y = W (a * b), with the factors kept for the backward pass and not their product.

A product of T x F entries is a pass over memory to form again, and a tensor as large as each factor to keep.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tangolm.ops.operators import register


def gated_product(
    a: Float[Tensor, "... F"], b: Float[Tensor, "... F"], weight: Float[Tensor, "d F"], *, impl: str = "auto"
) -> Float[Tensor, "... d"]:
    """W (a * b) in the dtype of the factors, to which the weight is converted.

    Args:
        impl: "reference" for plain torch, which keeps the product too and has second derivatives.
    """
    if impl == "reference":
        return forward(a, b, weight)
    return torch.ops.tangolm.gated_product(a, b, weight)


def forward(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    """What the operator `tangolm::gated_product` does."""
    with torch.autocast(a.device.type, enabled=False):
        return F.linear(a * b, weight.to(a.dtype))


def backward(grad: Tensor, a: Tensor, b: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `tangolm::gated_product_backward` does: the gradients of a, b and the weight."""
    with torch.autocast(a.device.type, enabled=False):
        product = a * b
        grad_weight = (grad.flatten(0, -2).t() @ product.flatten(0, -2)).to(weight.dtype)
        # Converted once more rather than kept: a looped model would keep a copy of its one weight for each application.
        grad_product = torch.matmul(grad, weight.to(a.dtype), out=product)
        return grad_product * b, grad_product.mul_(a), grad_weight


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, grad):
    return torch.ops.tangolm.gated_product_backward(grad, *ctx.saved_tensors)


def _differentiate_again(ctx, *grads):
    raise NotImplementedError("impl 'chunked' has no second derivative; impl='reference' has")


register(
    "tangolm::gated_product",
    forward,
    lambda a, b, weight: a.new_empty((*a.shape[:-1], weight.shape[0])),
    _differentiate,
    _save,
)
register(
    "tangolm::gated_product_backward",
    backward,
    lambda _, *inputs: tuple(tensor.new_empty(tensor.shape) for tensor in inputs),
    _differentiate_again,
)


@register_flop_formula(torch.ops.tangolm.gated_product)
def _forward_flops(a, b, weight, *_, **__) -> int:
    return 2 * math.prod(a) * weight[0]


@register_flop_formula(torch.ops.tangolm.gated_product_backward)
def _backward_flops(_, *shapes, **__) -> int:
    return 2 * _forward_flops(*shapes)

"""Registering a function with torch as an operator that compilers see whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def register(
    name: str,
    function: Callable[..., Any],
    shapes: Callable[..., Any],
    derivative: Callable[..., Any],
    save: Callable[..., None] | None = None,
) -> None:
    """Make `function` the operator `name`, with its shape rule and derivative.

    `torch.library.custom_op` does the same, but its first call imports the compiler: two seconds and 40 MB.

    Args:
        name: as in "tangolm::aggregate_gates".
        function: with annotated arguments, from which the schema follows; it changes none of them.
        shapes: the same arguments to empty results.
        derivative: context and gradients of the results to gradients of the arguments.
        save: context, arguments and results; keeps what the derivative needs.
    """
    schema = torch.library.infer_schema(function, mutates_args=())
    torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(name, "default", function)
    torch.library.register_fake(name, shapes)
    torch.library.register_autograd(name, derivative, setup_context=save)

"""Pure functions on tensors: the gate averaging of TANGO, in several implementations behind one function.

An implementation is a file and a line in `IMPLS`. Each takes query, key, gate, temperature, document ids, mask and `silu`,
the queries being the last T of the S sources, and returns the averages. `WINDOWED` has their counterparts with a window.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tangolm.ops import chunked, reference, window_chunked
from tangolm.ops import window as windowed
from tangolm.ops.features import FEATURES
from tangolm.ops.gated_product import gated_product
from tangolm.ops.sources import Sources
from tangolm.ops.window_state import WindowState

IMPLS = {"reference": reference.aggregate_gates, "chunked": chunked.aggregate_gates}
WINDOWED = {"reference": windowed.reference, "chunked": window_chunked.aggregate_gates}

__all__ = [
    "FEATURES",
    "IMPLS",
    "WINDOWED",
    "Sources",
    "WindowState",
    "aggregate_gates",
    "available",
    "choose",
    "gated_product",
]


def available(impl: str) -> str | None:
    """None where the implementation can run on this machine, else the reason why it cannot.

    Raises:
        ValueError: no implementation of that name.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl {impl!r} is not known; known: auto, {', '.join(IMPLS)}")
    return None


def choose(impl: str = "auto") -> str:
    """The name of the implementation that `impl` runs; "auto" takes the fastest that this machine has.

    Raises:
        ValueError: an unknown name, or one that cannot run here.
    """
    if impl == "auto":
        return "chunked"
    reason = available(impl)
    if reason is not None:
        raise ValueError(f"impl {impl!r} cannot run here: {reason}; impl='auto' takes one that can")
    return impl


def aggregate_gates(
    query: Float[Tensor, "B T H D"],
    key: Float[Tensor, "B T H D"],
    gate: Float[Tensor, "B T H E"],
    temperature: Float[Tensor, " H"],
    *,
    window: int | None = None,
    features: Float[Tensor, "H M D"] | None = None,
    document_ids: Int[Tensor, "B T"] | None = None,
    mask: Bool[Tensor, "B T"] | None = None,
    state: Sources | WindowState | None = None,
    silu: bool = False,
    impl: str = "auto",
) -> Float[Tensor, "B T H E"]:
    """For each destination, the average of the gates of its sources, weighted by exp(temperature * <query, key>).

    A source is visible to a destination that does not precede it, is of the same document, and where both are real. With a
    window only the last W of these are weighted so, and older ones by features that estimate the same weight.
    Source: arXiv:2608.22117, the TANGO update and Windowed TANGO.

    Args:
        query, key: unit vectors (RoPE applied), one a token and head.
        gate: the gate vector that each source emits.
        temperature: positive, one a head.
        window: W, real tokens of its document that a destination takes in full, itself included; None: all.
        features: directions of the features of older sources (see `FEATURES`), two features each; None: older sources do
            not count.
        document_ids: which document each token is of, non-decreasing along T; None: one document.
        mask: False at padding, which is neither source nor destination and gets zeros; None: all real.
        state: of earlier calls to go on from, a `Sources` or, with a window, a `WindowState`; it takes in this call's tokens
            (inference only).
        silu: the gates are SiLU of `gate`. Full averaging then keeps no more than `gate` for the backward pass.
        impl: "auto" or a key of `IMPLS`.

    Returns:
        The averages in the gate's dtype. Scores and weights are formed in at least float32.

    Raises:
        ValueError: shapes that do not fit, document ids that decrease, an implementation that cannot run.
    """
    if not torch.compiler.is_compiling():
        _check(query, key, gate, temperature, document_ids, mask)
        _check_window(query, window, features, state)
    full = window is None or (state is None and window >= query.shape[1])
    if silu and (state is not None or not full):
        gate, silu = F.silu(gate), False
    if window is not None and not full:
        average, rest = WINDOWED[choose(impl)], (query, key, gate, temperature, features, window, document_ids, mask)
        if isinstance(state, WindowState):
            return state.extend(average, *rest)
        return windowed.aggregate_gates(average, *rest)
    if isinstance(state, Sources):
        key, gate, document_ids, mask = state.extend(key, gate, document_ids, mask)
    return IMPLS[choose(impl)](query, key, gate, temperature, document_ids, mask, silu)


def _check(
    query: Tensor, key: Tensor, gate: Tensor, temperature: Tensor, document_ids: Tensor | None, mask: Tensor | None
) -> None:
    if query.ndim != 4:
        raise ValueError(f"query must be [B, T, H, D], got {tuple(query.shape)}")
    if 0 in query.shape[1:]:
        raise ValueError(f"query must have T, H and D of at least 1, got {tuple(query.shape)}")
    for name, tensor in (("query", query), ("key", key), ("gate", gate), ("temperature", temperature)):
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {tensor.dtype}; convert it with .float()")
    batch, tokens, heads, _ = query.shape
    if key.shape != query.shape:
        raise ValueError(f"key must have the shape of query {tuple(query.shape)}, got {tuple(key.shape)}")
    if gate.ndim != 4 or gate.shape[:3] != query.shape[:3]:
        raise ValueError(f"gate must be [{batch}, {tokens}, {heads}, E], got {tuple(gate.shape)}")
    if temperature.shape != (heads,):
        raise ValueError(f"temperature must be [{heads}], one a head, got {tuple(temperature.shape)}")
    check_documents(document_ids, mask, batch, tokens)


def _check_window(
    query: Tensor, window: int | None, features: Tensor | None, state: Sources | WindowState | None
) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    if window is None and features is not None:
        raise ValueError("features need a window: without one every source is weighted in full")
    if features is not None and (
        features.ndim != 3 or features.shape[::2] != query.shape[2:] or features.shape[1] == 0
    ):
        heads, width = query.shape[2:]
        raise ValueError(f"features must be directions [{heads}, M, {width}], got {tuple(features.shape)}")
    kind = Sources if window is None else WindowState
    if state is not None and not isinstance(state, kind):
        raise ValueError(f"state must be a {kind.__name__} where window is {window}, got a {type(state).__name__}")


def check_documents(
    document_ids: Tensor | None, mask: Tensor | None, batch: int, tokens: int, mask_name: str = "mask"
) -> None:
    """Refuse document ids and masks that do not fit [batch, tokens].

    Raises:
        ValueError: another shape, a mask that is not boolean, ids that are not whole numbers or decrease.
    """
    if document_ids is not None:
        if document_ids.shape != (batch, tokens):
            raise ValueError(f"document_ids must be [{batch}, {tokens}], got {tuple(document_ids.shape)}")
        if document_ids.dtype.is_floating_point or document_ids.dtype == torch.bool:
            raise ValueError(f"document_ids must be whole numbers, got {document_ids.dtype}")
        if tokens > 1 and bool((document_ids[:, 1:] < document_ids[:, :-1]).any()):
            raise ValueError("document_ids must not decrease along a row; number the documents in the order they stand")
    if mask is not None:
        if mask.shape != (batch, tokens):
            raise ValueError(f"{mask_name} must be [{batch}, {tokens}], got {tuple(mask.shape)}")
        if mask.dtype != torch.bool:
            raise ValueError(f"{mask_name} must be boolean (True at real tokens), got {mask.dtype}")

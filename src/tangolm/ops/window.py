"""Windowed gate averaging: near sources as in full averaging, older ones by features that estimate the same weight.

    out_i = (sum_near exp(s_ij) g_j + sum_far phi(q_i)^T phi(k_j) g_j) / (sum_near exp(s_ij) + sum_far phi(q_i)^T phi(k_j))

Near are the last W real tokens of the destination's document, itself among them; far all earlier ones. Source:
arXiv:2608.22117, Windowed TANGO. Without features far sources count nothing (a plain sliding window). phi: `features`.

`definition` is this sentence in loops. `reference` is the paper's blockwise form in plain torch: a destination of block b
takes blocks b - 1 and b pair by pair, the far ones of block b - 1 by their features, and blocks up to b - 2 by sums
(`window_sums`). `window_chunked` is the same with a hand-written backward, `window_state` goes on from earlier calls.

All weights of a destination are formed with one subtrahend in the exponent, near and far together: the largest of its near
scores and of <its own log features + the offsets of the sums>. Since sqrt(2) |w| x - x^2 <= |w|^2 / 2, the latter exceeds the
largest weight by |w|^2 / 2 at most, about e^16 for D = 32 (e^32 for the longest directions), so nothing that counts is lost.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tangolm.ops.features import both_ways, log_scale, log_weights
from tangolm.ops.window_sums import NONE, PADDING, Sums

Average = Callable[..., tuple[Tensor, Sums | None]]


def aggregate_gates(
    average: Average,
    query: Float[Tensor, "B T H D"],
    key: Float[Tensor, "B T H D"],
    gate: Float[Tensor, "B T H E"],
    temperature: Float[Tensor, " H"],
    features: Float[Tensor, "H M D"] | None,
    window: int,
    document_ids: Int[Tensor, "B T"] | None,
    mask: Bool[Tensor, "B T"] | None,
) -> Float[Tensor, "B T H E"]:
    """The averages by `average`, a form that knows documents but no padding: padding moves to the front as a document."""
    order = None
    if mask is not None:
        ids = torch.zeros_like(mask, dtype=torch.long) if document_ids is None else document_ids.long()
        document_ids = ids.masked_fill(~mask, PADDING)
        order = compacting(mask)
        if order is not None:
            query, key, gate, document_ids = (take(x, order) for x in (query, key, gate, document_ids))
    out = average(query, key, gate, temperature, features, window, document_ids)[0]
    out = out if order is None else take(out, order.argsort(1))
    return out if mask is None else out.masked_fill(~mask[:, :, None, None], 0.0)


def compacting(real: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"] | None:
    """The order that moves padding to the front and keeps real tokens in theirs; None where they stand so (on a CPU)."""
    if (
        real.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not bool((real[:, :-1] & ~real[:, 1:]).any())
    ):
        return None
    return real.long().argsort(stable=True, dim=1)


def take(x: Tensor, order: Int[Tensor, "B T"]) -> Tensor:
    """x [B, T, ...] with the tokens of each row in that order."""
    rows = torch.arange(order.shape[0], device=order.device)[:, None] * order.shape[1]
    return x.flatten(0, 1).index_select(0, (order + rows).flatten()).view(x.shape)


def definition(
    query: Float[Tensor, "B T H D"],
    key: Float[Tensor, "B T H D"],
    gate: Float[Tensor, "B T H E"],
    temperature: Float[Tensor, " H"],
    features: Float[Tensor, "H M D"] | None,
    window: int,
    document_ids: Int[Tensor, "B T"] | None = None,
    mask: Bool[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T H E"]:
    """The averages, destination by destination: what every other form is judged by. Slow; in float64 it is exact."""
    rows = []
    for b in range(query.shape[0]):
        averages: list[Tensor] = []
        for i in range(query.shape[1]):
            if mask is not None and not mask[b, i]:
                averages.append(torch.zeros_like(gate[b, i]))
                continue
            seen = [
                j
                for j in range(i + 1)
                if (document_ids is None or document_ids[b, j] == document_ids[b, i]) and (mask is None or mask[b, j])
            ]
            far, near = seen[:-window], seen[-window:]
            logs = temperature * (query[b, i] * key[b, near]).sum(-1)  # [near, H]
            if features is not None and far:
                logs = torch.cat([log_weights(query[b, i : i + 1], key[b, far], temperature, features)[0], logs])
                near = seen
            averages.append((logs.softmax(0)[..., None] * gate[b, near]).sum(0))
        rows.append(torch.stack(averages))
    return torch.stack(rows)


def reference(
    query: Float[Tensor, "B T H D"],
    key: Float[Tensor, "B T H D"],
    gate: Float[Tensor, "B T H E"],
    temperature: Float[Tensor, " H"],
    features: Float[Tensor, "H M D"] | None,
    window: int,
    document_ids: Int[Tensor, "B T"] | None,
    sums: Sums | None = None,
) -> tuple[Float[Tensor, "B T H E"], Sums | None]:
    """The averages block by block, nothing skipped: its products are those that the paper counts.

    `sums` over all earlier sources may be given (and are needed with features when there are any); returned are the sums
    over these and all blocks but the last two. Features are formed by elementwise work, which the paper does not count.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    wide = torch.promote_types(gate.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        tau = temperature.to(dtype)
        # Each list starts with an empty block in front of the first.
        queries, keys = (_blocks(x.to(dtype), window) for x in (query, key))
        gates = _blocks(gate.to(wide), window)
        ids = None if document_ids is None else _blocks(document_ids, window)
        history: list[Sums] = []  # history[n]: the sums over n blocks
        if features is not None:
            batch, _, heads, channels = gate.shape
            start = Sums.empty(batch, heads, 2 * features.shape[1], channels, wide, gate.device)
            history.append(start if sums is None else sums)
            for b in range(1, len(keys)):
                log_keys = _log_features(keys[b], tau, features)
                history.append(history[-1].absorb(log_keys, gates[b], None if ids is None else ids[b]))
        lower = torch.ones((window, window), dtype=torch.bool, device=query.device).tril()
        none = torch.zeros_like(lower)
        averages = []
        for b in range(1, len(queries)):
            near, far = torch.cat([~lower if b > 1 else none, lower], 1)[None], (lower if b > 1 else none)[None]
            if ids is not None:
                same = ids[b][:, :, None] == torch.cat([ids[b - 1], ids[b]], 1)[:, None]
                near, far = near & same, far & same[:, :, :window]
            logs = torch.einsum("bthd,bshd->bhts", queries[b] * tau[:, None], torch.cat([keys[b - 1], keys[b]], 1))
            logs = logs.masked_fill(~near[:, None], NONE)
            older = None
            if features is not None:
                log_query = _log_features(queries[b], tau, features) + log_scale(tau, features)[:, None, None]
                log_key = _log_features(keys[b - 1], tau, features)
                pairs = torch.logsumexp(log_query[:, :, :, None] + log_key[:, :, None], -1)
                pairs = pairs.masked_fill(~far[:, None], NONE)
                logs = torch.cat([torch.maximum(logs[..., :window], pairs), logs[..., window:]], -1)
                sums = history[max(b - 2, 0)]
                older = log_query + sums.offset[:, :, None]
                if ids is not None:
                    older = older.masked_fill((ids[b] != sums.document[:, None])[:, None, :, None], NONE)
            both = logs if older is None else torch.cat([logs, older], -1)
            subtrahend = both.detach().amax(-1, keepdim=True)
            weights = (both - subtrahend).exp()
            if older is not None and sums is not None:
                total = weights[..., : 2 * window].sum(-1) + (weights[..., 2 * window :] * sums.total[:, :, None]).sum(
                    -1
                )
            else:
                total = weights.sum(-1)
            weights = (weights / total[..., None]).to(wide)
            pair_gates = torch.cat([gates[b - 1], gates[b]], 1)
            average = torch.einsum("bhts,bshe->bthe", weights[..., : 2 * window], pair_gates)
            if older is not None and sums is not None:
                average = average + torch.einsum("bhtm,bhme->bthe", weights[..., 2 * window :], sums.gates)
            averages.append(average)
        out = torch.cat(averages, 1)[:, : query.shape[1]].to(gate.dtype)
        return out, history[max(len(history) - 3, 0)] if history else None


def _log_features(x: Tensor, temperature: Tensor, directions: Tensor) -> Float[Tensor, "B H W m"]:
    projected = (x[..., None, :] * directions.to(x.dtype)).sum(-1) * temperature.sqrt()[:, None]
    return both_ways(projected).transpose(1, 2)


def _blocks(x: Tensor, window: int) -> list[Tensor]:
    """[B, T, ...] as [B, W, ...] pieces, filled up with zeros at the end and with a piece of zeros in front."""
    return list(F.pad(x, [0, 0] * (x.ndim - 2) + [window, -x.shape[1] % window]).split(window, 1))

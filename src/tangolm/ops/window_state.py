"""The state of windowed gate averaging: the tokens that are still near or not yet in the sums, and the sums.

Between W - 1 and 2W - 2 tokens are kept. Whole blocks of W move into the sums at once, so these are rounded as often as those
of a single call, and the state's size depends neither on the number of tokens nor on documents and padding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tangolm.ops.features import both_ways, log_scale, projections
from tangolm.ops.window import Average, compacting, take
from tangolm.ops.window_sums import NONE, PADDING, Sums


class WindowState:
    """For inference: a call goes on behind the tokens of earlier ones; all calls have one window and one feature map."""

    def __init__(self) -> None:
        self.length = 0
        self._count = 0  # tokens in the buffers, which are head-major [B, H, 2W - 1, ...]
        self._key: Tensor | None = None
        self._gate: Tensor | None = None
        self._ids: Tensor | None = None  # [B, count], padding in front; None while every token is of document 0
        self._window = 0
        self._last: Tensor | None = None  # [B]: the document that goes on where a call brings no ids
        self._sums: Sums | None = None

    def extend(
        self,
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
        """The averages of T more tokens, by `average` (a form of the windowed averaging) where they are several.

        Without `document_ids` the last document goes on; without `mask` the tokens are real.

        Raises:
            ValueError: another batch, head count, width or window than before; operands that need a gradient.
        """
        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, gate, temperature)):
            raise ValueError("a cache is for inference: call the model or the operation under torch.no_grad()")
        self._prepare(key, gate, features, window)
        count, tokens = self._count, query.shape[1]
        ids = self._join(document_ids, mask, query)
        self.length += tokens
        assert self._key is not None
        assert self._gate is not None
        if tokens == 1 and (mask is None or bool(mask.all())):
            self._key[:, :, count], self._gate[:, :, count] = key[:, 0], gate[:, 0]
            held_keys, held_gates = self._key[:, :, : count + 1], self._gate[:, :, : count + 1]
            out = self._step(query[:, 0], held_keys, held_gates, temperature, features, ids)
            self._count, self._ids = count + 1, ids
            if self._count == self._key.shape[2]:
                self._keep(held_keys.transpose(1, 2), held_gates.transpose(1, 2), ids, 0, temperature, features)
            return out[:, None].to(gate.dtype)
        key = torch.cat([self._key[:, :, :count].transpose(1, 2), key], 1)
        gate = torch.cat([self._gate[:, :, :count].transpose(1, 2), gate], 1)
        query = F.pad(query, (0, 0, 0, 0, count, 0))  # what earlier destinations would get is dropped
        order = None
        if mask is not None and ids is not None:
            order = compacting(ids != PADDING)
            if order is not None:
                query, key, gate, ids = (take(x, order) for x in (query, key, gate, ids))
        out, sums = average(query, key, gate, temperature, features, self._window, ids, self._sums)
        self._sums = sums
        done = max(-(-(count + tokens) // self._window) - 2, 0)
        self._keep(key, gate, ids, done, temperature, features)
        out = (out if order is None else take(out, order.argsort(1)))[:, count:]
        return out if mask is None else out.masked_fill(~mask[:, :, None, None], 0.0)

    def reorder(self, rows: Int[Tensor, " B"]) -> None:
        """Keep `rows` of the batch in that order (beam search)."""
        for name in ("_key", "_gate", "_ids", "_last"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.index_select(0, rows))
        if self._sums is not None:
            self._sums = Sums(*(tensor.index_select(0, rows) for tensor in self._sums))

    @property
    def bytes(self) -> int:
        """Memory that the state holds."""
        held = (self._key, self._gate, self._ids, self._last, *(self._sums or ()))
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def _step(
        self,
        query: Float[Tensor, "B H D"],
        key: Float[Tensor, "B H n D"],
        gate: Float[Tensor, "B H n E"],
        temperature: Tensor,
        features: Tensor | None,
        ids: Tensor | None,
    ) -> Float[Tensor, "B H E"]:
        """The averages of the last token."""
        wide = torch.promote_types(gate.dtype, torch.float32)
        dtype = torch.promote_types(query.dtype, torch.float32)
        query, key, tau, sums = query.to(dtype), key.to(dtype), temperature.to(dtype), self._sums
        with torch.autocast(query.device.type, enabled=False):
            logs = ((query * tau[:, None])[:, :, None] @ key.transpose(2, 3))[:, :, 0]
            tokens, far = key.shape[2], max(0, key.shape[2] - self._window)
            if features is not None and sums is not None:
                log_query = both_ways(projections(query[:, None], tau, features)) + log_scale(tau, features)[:, None]
                if far:
                    log_keys = both_ways(projections(key[:, :, :far].transpose(1, 2), tau, features))
                    logs[..., :far] = torch.logsumexp(log_query + log_keys, -1).transpose(1, 2)
                older = log_query[:, 0] + sums.offset
                if ids is not None:
                    older = older.masked_fill((sums.document != ids[:, -1])[:, None, None], NONE)
                logs = torch.cat([logs, older], -1)
            else:
                logs[..., :far] = NONE
            if ids is not None:
                logs[..., :tokens].masked_fill_((ids != ids[:, -1:])[:, None], NONE)
            weights = (logs - logs.amax(-1, keepdim=True)).exp()
            if sums is None:
                return ((weights / weights.sum(-1, keepdim=True)).to(wide)[:, :, None] @ gate.to(wide))[:, :, 0]
            total = weights[..., :tokens].sum(-1) + (weights[..., tokens:] * sums.total).sum(-1)
            weights = (weights / total[..., None]).to(wide)[:, :, None]
            return (weights[..., :tokens] @ gate.to(wide) + weights[..., tokens:] @ sums.gates)[:, :, 0]

    def _keep(
        self,
        key: Float[Tensor, "B n H D"],
        gate: Float[Tensor, "B n H E"],
        ids: Tensor | None,
        done: int,
        temperature: Tensor,
        features: Tensor | None,
    ) -> None:
        """Move whole blocks into the sums, the first `done` of them being there, and at least W - 1 tokens to the buffers."""
        w = self._window
        blocks = max(0, (key.shape[1] - w + 1) // w)
        if features is not None and self._sums is not None:
            tau = temperature.to(self._sums.total.dtype)
            for b in range(done, blocks):
                some = slice(b * w, (b + 1) * w)
                log_keys = both_ways(projections(key[:, some].to(tau.dtype), tau, features)).transpose(1, 2)
                self._sums = self._sums.absorb(log_keys, gate[:, some], None if ids is None else ids[:, some])
        assert self._key is not None
        assert self._gate is not None
        self._count = key.shape[1] - blocks * w
        self._ids = None if ids is None else ids[:, blocks * w :].clone()
        for buffer, tensor in ((self._key, key), (self._gate, gate)):
            kept = tensor[:, blocks * w :].transpose(1, 2)
            # A step moves within the buffer itself, by W and never more than W - 1 tokens: source and target do not overlap.
            buffer[:, :, : self._count] = kept

    def _join(self, document_ids: Tensor | None, mask: Tensor | None, like: Tensor) -> Int[Tensor, "B n"] | None:
        """The documents of the buffered tokens and of the new ones, with padding as `PADDING`."""
        if document_ids is None and mask is None and self._ids is None:
            return None
        batch, tokens = like.shape[:2]
        past = self._ids
        if past is None:
            past = torch.zeros((batch, self._count), dtype=torch.long, device=like.device)
        if document_ids is not None:
            self._last = document_ids[:, -1].long()
        elif self._last is None:
            self._last = torch.zeros(batch, dtype=torch.long, device=like.device)
        new = self._last[:, None].expand(batch, tokens) if document_ids is None else document_ids.long()
        return torch.cat([past, new if mask is None else new.masked_fill(~mask, PADDING)], 1)

    def _prepare(self, key: Tensor, gate: Tensor, features: Tensor | None, window: int) -> None:
        batch, _, heads, width = key.shape
        channels = gate.shape[3]
        if self._key is None or self._gate is None:
            self._window = window
            self._key = key.new_empty((batch, heads, 2 * window - 1, width))
            self._gate = gate.new_empty((batch, heads, 2 * window - 1, channels))
            if features is not None:
                wide = torch.promote_types(gate.dtype, torch.float32)
                self._sums = Sums.empty(batch, heads, 2 * features.shape[1], channels, wide, gate.device)
            return
        m = None if self._sums is None else self._sums.total.shape[2]
        had = (*self._key.shape[:2], self._key.shape[3], self._gate.shape[3], self._window, m)
        got = (batch, heads, width, channels, window, None if features is None else 2 * features.shape[1])
        if had != got:
            raise ValueError(
                f"state is for (batch, heads, key width, gate width, window, features) {had}, got {got}; "
                "start a new state for another batch or model"
            )

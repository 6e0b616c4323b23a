"""The state of gate averaging and of attention: the sources seen so far.

A source is a key and a value (for TANGO the value is the gate vector). Calls append to the buffers, so a token, a piece and
a whole sequence are one algorithm: the queries of a call are always the last T of all sources.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Sources:
    """Keys and values of all tokens so far, kept head-major and grown by doubling.

    For inference: a source that needs a gradient is refused, since the buffers are written in place.
    """

    def __init__(self) -> None:
        self.length = 0
        self._key: Tensor | None = None  # [B, H, capacity, D]
        self._value: Tensor | None = None  # [B, H, capacity, E]
        self._document_ids: Tensor | None = None  # [B, length]; None while every token is of document 0
        self._mask: Tensor | None = None  # [B, length]; None while every token is real

    def extend(
        self,
        key: Float[Tensor, "B T H D"],
        value: Float[Tensor, "B T H E"],
        document_ids: Int[Tensor, "B T"] | None = None,
        mask: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Append T sources; return all S of them as [B, S, H, D], [B, S, H, E], [B, S], [B, S].

        Without `document_ids` the last document goes on; without `mask` the tokens are real.

        Raises:
            ValueError: another batch size, head count or width than the sources before; sources that need a gradient.
        """
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise ValueError("a cache is for inference: call the model or the operation under torch.no_grad()")
        batch, tokens = key.shape[:2]
        self._check(key, value)
        total = self.length + tokens
        self._key = _appended(self._key, key.transpose(1, 2), self.length)
        self._value = _appended(self._value, value.transpose(1, 2), self.length)
        if document_ids is not None or self._document_ids is not None:
            past = self._document_ids
            if past is None:
                past = key.new_zeros((batch, self.length), dtype=torch.long)
            if document_ids is None:
                document_ids = past[:, -1:].expand(batch, tokens)
            self._document_ids = torch.cat([past, document_ids.to(past.dtype)], dim=1)
        if mask is not None or self._mask is not None:
            past = self._mask
            if past is None:
                past = torch.ones((batch, self.length), dtype=torch.bool, device=key.device)
            if mask is None:
                mask = past.new_ones((batch, tokens))
            self._mask = torch.cat([past, mask], dim=1)
        self.length = total
        keys, values = self._key[:, :, :total], self._value[:, :, :total]
        return keys.transpose(1, 2), values.transpose(1, 2), self._document_ids, self._mask

    def reorder(self, rows: Int[Tensor, " B"]) -> None:
        """Keep `rows` of the batch in that order (beam search)."""
        for name in ("_key", "_value", "_document_ids", "_mask"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.index_select(0, rows))

    @property
    def bytes(self) -> int:
        """Memory that the buffers hold."""
        held = (self._key, self._value, self._document_ids, self._mask)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def _check(self, key: Tensor, value: Tensor) -> None:
        for name, new, buffer in (("key", key, self._key), ("value", value, self._value)):
            if buffer is None:
                continue
            had = (buffer.shape[0], buffer.shape[1], buffer.shape[3])
            got = (new.shape[0], new.shape[2], new.shape[3])
            if had != got:
                raise ValueError(
                    f"state holds {name}s of (batch, heads, width) {had}, got {got}; "
                    "start a new state for another batch or model"
                )


def _appended(buffer: Tensor | None, new: Tensor, length: int) -> Tensor:
    batch, heads, tokens, width = new.shape
    if buffer is None or buffer.shape[2] < length + tokens:
        # An exact fit at first (a prefill is often all there is), doubling afterwards: amortised constant cost a token.
        capacity = tokens if buffer is None else max(length + tokens, 2 * buffer.shape[2])
        grown = new.new_empty((batch, heads, capacity, width))
        if buffer is not None:
            grown[:, :, :length] = buffer[:, :, :length]
        buffer = grown
    buffer[:, :, length : length + tokens] = new
    return buffer

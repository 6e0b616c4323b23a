"""Where the tokens of a call stand, in a row, in its documents and behind the tokens of earlier calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tangolm.models.layers import Layout, rope_tables

if TYPE_CHECKING:
    from tangolm.models.base import ModelConfig


class Cache:
    """What generation keeps: one state an application of a block, and where each row's last document stands."""

    def __init__(self, config: ModelConfig, states: list[Any], batch_size: int) -> None:
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")
        self.config = config
        self.states = states
        self.batch_size = batch_size
        self.length = 0
        self._next_position: Tensor | None = None  # [B]: real tokens of the row's last document so far
        self._last_document: Tensor | None = None  # [B]

    def check(self, config: ModelConfig, rows: int) -> None:
        """Refuse a call of another model or batch size, before anything is changed.

        Raises:
            ValueError: the cache is of another configuration, or for another number of rows.
        """
        if self.config != config:
            raise ValueError("cache is of another model; make one with new_cache of the model that takes it")
        if self.batch_size != rows:
            raise ValueError(f"cache is for {self.batch_size} rows, this call has {rows}; make another with new_cache")

    @property
    def bytes(self) -> int:
        """Memory held by the states."""
        return sum(state.bytes for state in self.states)

    def reorder(self, rows: Int[Tensor, " B"]) -> None:
        """Keep `rows` of the batch in that order (beam search)."""
        for state in self.states:
            state.reorder(rows)
        self.batch_size = rows.shape[0]
        if self._next_position is not None and self._last_document is not None:
            self._next_position = self._next_position.index_select(0, rows)
            self._last_document = self._last_document.index_select(0, rows)

    def advance(self, document_ids: Tensor | None, mask: Tensor | None, like: Tensor) -> Int[Tensor, "B T"]:
        """Take in the tokens of a call ([B, T] as `like`) and return their positions."""
        batch, tokens = like.shape
        if self._next_position is None or self._last_document is None:
            self._next_position = like.new_zeros(batch)
            self._last_document = like.new_zeros(batch) if document_ids is None else document_ids[:, 0]
        if document_ids is None and mask is None:
            positions = self._next_position[:, None] + torch.arange(tokens, device=like.device)
            self._next_position = self._next_position + tokens
        else:
            last = self._last_document[:, None]
            documents = last.expand(batch, tokens) if document_ids is None else document_ids
            positions = positions_in_documents(documents, mask, last, self._next_position)
            self._last_document = documents[:, -1]
            real = 1 if mask is None else mask[:, -1].long()
            self._next_position = positions[:, -1] + real
        self.length += tokens
        return positions


def layout_of(
    like: Int[Tensor, "B T"],
    mask: Bool[Tensor, "B T"] | None,
    document_ids: Int[Tensor, "B T"] | None,
    cache: Cache | None,
    config: ModelConfig,
    dtype: torch.dtype,
) -> Layout:
    """Where the tokens of a call stand; `like` brings shape and device, and the cache takes the tokens in."""
    if cache is not None:
        positions = cache.advance(document_ids, mask, like)
    elif document_ids is None and mask is None:
        positions = torch.arange(like.shape[1], device=like.device)[None]
    else:
        documents = torch.zeros_like(like) if document_ids is None else document_ids
        positions = positions_in_documents(documents, mask)
    rope = None if config.rope is None else rope_tables(positions, *config.rope, dtype)
    return Layout(positions, rope, document_ids, mask)


def positions_in_documents(
    document_ids: Int[Tensor, "B T"],
    mask: Bool[Tensor, "B T"] | None,
    last_document: Int[Tensor, "B 1"] | None = None,
    next_position: Int[Tensor, " B"] | None = None,
) -> Int[Tensor, "B T"]:
    """Each token's index among the real tokens of its document; a document may go on from an earlier call."""
    real = torch.ones_like(document_ids) if mask is None else mask.long()
    before = real.cumsum(1) - real
    first = document_ids[:, :1] if last_document is None else last_document
    previous = torch.cat([first.to(document_ids.dtype), document_ids[:, :-1]], dim=1)
    # A document's first token in this call sets the count to subtract; one that goes on adds what it had.
    start = -(torch.zeros_like(before[:, 0]) if next_position is None else next_position)[:, None]
    base = torch.where(document_ids != previous, before, start).cummax(1).values
    return before - base

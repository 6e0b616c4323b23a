"""The shell that all architectures share, and the contracts of a model configuration and of a block.

    h_0 = E[token]      h <- h + block_n(h), n = 1..N      logits = RMSNorm_f(h) E^T

Embedding tied with the head, no position table, no biases. An architecture brings a `ModelConfig` (its fields and its
counts) and a `Block` (its update, its state in generation); everything else is here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tangolm.models.cache import Cache, layout_of
from tangolm.models.depth import Depth
from tangolm.models.layers import Application, Layout, RMSNorm
from tangolm.ops import check_documents
from tangolm.ops.loss import IGNORED, head_nll

LARGEST = 2**31 - 1  # of any size in a configuration


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ABC):
    """What every architecture has; a child adds its own fields and says what one block costs.

    Args:
        architecture: its key in `MODELS`; each child fixes it.
        vocab_size: V, the tokenizer's size, end token included.
        context: L, tokens a training sequence has; the length at which operations are counted.
        depth: N, applications of a block.
        looped: one block applied N times, or N blocks.
        width: d.
        gated_width: F, channels of the gated (or feed-forward) product.
        vocab_multiple: the embedding gets rows up to a multiple of this (for speed); the added ones are never logits.
        norm_eps: added to the mean square in RMSNorm.
        init_std: standard deviation of initial weights.
    """

    architecture: str
    vocab_size: int
    context: int
    depth: int
    looped: bool
    width: int
    gated_width: int
    vocab_multiple: int = 1
    norm_eps: float = 1e-6
    init_std: float = 0.02

    def __post_init__(self) -> None:
        self.at_least_one("vocab_size", "context", "depth", "width", "gated_width", "vocab_multiple")
        self.positive("norm_eps", "init_std")

    def at_least_one(self, *names: str) -> None:
        """Refuse fields below 1."""
        for name in names:
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
            if value > LARGEST:
                raise ValueError(f"{name} must be at most {LARGEST:,}, got {value}")

    def positive(self, *names: str) -> None:
        """Refuse fields that are not above 0."""
        for name in names:
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")

    @property
    @abstractmethod
    def rope(self) -> tuple[int, float] | None:
        """Channels that RoPE turns and the base of its frequencies; None: no RoPE."""

    @property
    def limit(self) -> int | None:
        """Tokens that a row can have, those in a cache included; a call with more is refused. None: any number."""
        return None

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding."""
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple

    @abstractmethod
    def block_parameters(self) -> int:
        """Parameters of one block, norms included."""

    @abstractmethod
    def block_macs(self, tokens: int, pairs: int) -> int:
        """Multiply-accumulates of one application: products with weights for `tokens`, interactions for `pairs`."""

    def parameters(self) -> dict[str, int]:
        """`non_embedding` (final norm included) and `total` parameters; the tied embedding counts once."""
        non_embedding = self.block_parameters() * (1 if self.looped else self.depth) + self.width
        return {"non_embedding": non_embedding, "total": non_embedding + self.padded_vocab_size * self.width}

    def macs(self, tokens: int | None = None) -> dict[str, int]:
        """Multiply-accumulates of a forward pass over one sequence of `tokens` (default: the context).

        `macs` is the paper's convention: head included, all T^2 pairs counted; `useful_macs` counts the T (T + 1) / 2 pairs
        that causality needs.
        """
        tokens = self.context if tokens is None else tokens
        head = tokens * self.width * self.padded_vocab_size
        return {
            "macs": self.depth * self.block_macs(tokens, tokens * tokens) + head,
            "useful_macs": self.depth * self.block_macs(tokens, tokens * (tokens + 1) // 2) + head,
        }


@dataclass(frozen=True, kw_only=True)
class HeadsConfig(ModelConfig):
    """An architecture with RoPE heads and a gated width that may rotate.

    Args:
        head_width: D, channels of a head's query and key; d is a multiple of it.
        rope_base: base of RoPE's frequencies.
        segments: equal parts of the gated width, of which an application computes one (`rotating`); 1: all of it.
    """

    head_width: int = 32
    rope_base: float = 10_000.0
    segments: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least_one("head_width", "segments")
        self.positive("rope_base")
        if self.head_width % 2:
            raise ValueError(f"head_width must be even (RoPE turns pairs), got {self.head_width}")
        if self.width % self.head_width:
            raise ValueError(f"width must be a multiple of head_width {self.head_width}, got {self.width}")

    @property
    def heads(self) -> int:
        """H = d / head_width."""
        return self.width // self.head_width

    @property
    def rope(self) -> tuple[int, float]:
        return self.head_width, self.rope_base


class Block(nn.Module, ABC):
    """One block: `forward` gives the update that the shell adds to h.

    A child is built as `Block(config, impl)`, refuses an `impl` it does not have, and keeps the resolved name in `self.impl`.
    """

    impl: str

    @abstractmethod
    def forward(
        self, h: Float[Tensor, "B T d"], layout: Layout, application: Application, state: Any = None
    ) -> Float[Tensor, "B T d"]:
        """The update of h; `state`, where given, holds the tokens of earlier calls and takes these."""

    @abstractmethod
    def new_state(self) -> Any:
        """An empty state for generation: `reorder(rows)` keeps rows of the batch, `bytes` is its memory."""

    @abstractmethod
    def outputs(self) -> Iterable[nn.Linear]:
        """The projections that write to h; their initial weights are scaled by 1 / sqrt(2 N)."""

    def draw_buffers(self, generator: torch.Generator | None) -> None:
        """Draw what belongs to the block and is not learned; without a generator from torch's own."""
        return


class ModelOutput(NamedTuple):
    """Loss (float32 scalar, mean over supervised tokens), logits [B, T, V] and cache; None where not asked for."""

    loss: Tensor | None
    logits: Tensor | None
    cache: Cache | None


class Score(NamedTuple):
    """Per predicted token, [B, T - 1]: NLL in nats (float32, 0 where unsupervised), argmax hit, and whether it counts."""

    nll: Tensor
    correct: Tensor
    counted: Tensor


class LanguageModel(nn.Module):
    """A language model of one architecture; built by `tangolm.build_model`."""

    def __init__(self, config: ModelConfig, block: type[Block], impl: str = "auto") -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.padded_vocab_size, config.width)
        self.blocks = Depth([block(config, impl) for _ in range(1 if config.looped else config.depth)], config.depth)
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.impl: str = self.blocks[0].impl
        self._rotation: int | None = 0

    def forward(
        self,
        input_ids: Int[Tensor, "B T"],
        labels: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | None = None,
        document_ids: Int[Tensor, "B T"] | None = None,
        cache: Cache | None = None,
        return_logits: bool | None = None,
    ) -> ModelOutput:
        """Logits, or the loss where labels are given.

        Args:
            input_ids: tokens below the vocabulary's size.
            labels: aligned with `input_ids` and shifted inside; -100 is ignored, and so is a token whose predecessor is
                padding or of another document.
            attention_mask: [B, T], nonzero at real tokens, of the tokens of this call only.
            document_ids: non-decreasing along a row; tokens of different documents do not see each other.
            cache: from `new_cache`; this call goes on behind its tokens. Only under `torch.no_grad()`.
            return_logits: None: only when there are no labels.

        Raises:
            ValueError: shapes that do not fit, a token outside the vocabulary, document ids that decrease, more
                tokens than the architecture takes. The cache is then as it was.
        """
        mask = None if attention_mask is None else attention_mask.to(torch.bool)
        if not torch.compiler.is_compiling():
            self._check(input_ids, labels, mask, document_ids, cache)
        hidden = self.hidden(input_ids, mask, document_ids, cache)
        logits = self.logits(hidden) if labels is None or return_logits else None
        loss = None
        if labels is not None:
            counted = supervised(labels, mask, document_ids)
            loss = self.mean_nll(hidden, labels, counted)
        return ModelOutput(loss, logits, cache)

    def hidden(
        self,
        input_ids: Int[Tensor, "B T"],
        mask: Bool[Tensor, "B T"] | None = None,
        document_ids: Int[Tensor, "B T"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "B T d"]:
        """The normalised last hidden state, which the head multiplies by the embedding."""
        dtype = self.embedding.weight.dtype
        layout = layout_of(input_ids, mask, document_ids, cache, self.config, dtype)
        h = self.embedding(input_ids)
        return self.norm(self.blocks(h, layout, self._rotation, None if cache is None else cache.states))

    def mean_nll(
        self, hidden: Float[Tensor, "B T d"], labels: Int[Tensor, "B T"], counted: Bool[Tensor, "B Tm1"]
    ) -> Float[Tensor, " "]:
        """Mean NLL in nats over the counted predictions, in at least float32; 0 where none counts."""
        targets = labels[:, 1:].masked_fill(~counted, IGNORED).flatten()
        nll = head_nll(hidden[:, :-1].flatten(0, 1), self.embedding.weight, targets, self.config.vocab_size)
        return nll / counted.sum().clamp(min=1)

    def recompute(self, on: bool = True) -> None:
        """Save memory in training from now on: form most activations again in the backward pass, to the same bits."""
        self.blocks.recompute = on

    def rotate(self, offset: int | None) -> None:
        """Which segment of a rotating width application n takes from now on: (n + offset) mod segments; None: all of them.

        Raises:
            ValueError: a model whose width does not rotate.
        """
        segments = getattr(self.config, "segments", 1)
        if segments == 1:
            raise ValueError(
                f"rotate: this {self.config.architecture} model has no segments; build it with segments above 1"
            )
        self._rotation = None if offset is None else offset % segments

    def logits(self, hidden: Float[Tensor, "... d"]) -> Float[Tensor, "... V"]:
        """Scores of every token of the vocabulary; padding rows of the embedding give none."""
        return F.linear(hidden, self.embedding.weight)[..., : self.config.vocab_size]

    @torch.no_grad()
    def score(
        self,
        input_ids: Int[Tensor, "B T"],
        labels: Int[Tensor, "B T"],
        attention_mask: Tensor | None = None,
        document_ids: Int[Tensor, "B T"] | None = None,
        block: int = 1024,
    ) -> Score:
        """NLL and argmax hits token by token, without gradient; only `block` rows of logits exist at a time."""
        mask = None if attention_mask is None else attention_mask.to(torch.bool)
        if not torch.compiler.is_compiling():
            self._check(input_ids, labels, mask, document_ids, None)
        counted = supervised(labels, mask, document_ids)
        hidden = self.hidden(input_ids, mask, document_ids)[:, :-1][counted]
        targets = labels[:, 1:][counted]
        nll = torch.zeros(counted.shape, dtype=torch.float32, device=hidden.device)
        correct = torch.zeros_like(counted)
        nlls, hits = [], []
        for rows, target in zip(hidden.split(block), targets.split(block), strict=True):
            logits = _wide(self.logits(rows))
            nlls.append(F.cross_entropy(logits, target, reduction="none").to(torch.float32))
            hits.append(logits.argmax(-1) == target)
        if nlls:
            nll[counted] = torch.cat(nlls)
            correct[counted] = torch.cat(hits)
        return Score(nll, correct, counted)

    def new_cache(self, batch_size: int) -> Cache:
        """An empty cache for `batch_size` rows.

        Raises:
            ValueError: a batch size below 1.
        """
        return Cache(self.config, [self.blocks.at(n).new_state() for n in range(self.config.depth)], batch_size)

    def _check(
        self,
        input_ids: Tensor,
        labels: Tensor | None,
        mask: Tensor | None,
        document_ids: Tensor | None,
        cache: Cache | None,
    ) -> None:
        if input_ids.ndim != 2 or input_ids.shape[1] == 0:
            raise ValueError(f"input_ids must be [B, T] with T at least 1, got {tuple(input_ids.shape)}")
        if labels is not None and labels.shape != input_ids.shape:
            raise ValueError(
                f"labels must be aligned with input_ids {tuple(input_ids.shape)}, got {tuple(labels.shape)}"
            )
        check_documents(document_ids, mask, *input_ids.shape, mask_name="attention_mask")
        if cache is not None:
            if not isinstance(cache, Cache):
                raise ValueError(f"cache must come from new_cache, got {type(cache).__name__}")
            cache.check(self.config, input_ids.shape[0])
        total, limit = input_ids.shape[1] + (0 if cache is None else cache.length), self.config.limit
        if limit is not None and total > limit:
            raise ValueError(
                f"input_ids: {total} tokens in a row, but this {self.config.architecture} model has a context of {limit} and "
                "no position bias beyond; give fewer, or build it with a larger context"
            )
        # Elsewhere the range check would wait for the device at every step.
        if input_ids.device.type == "cpu" and input_ids.numel():
            low, high = int(input_ids.min()), int(input_ids.max())
            if low < 0 or high >= self.config.vocab_size:
                token = low if low < 0 else high
                raise ValueError(f"input_ids holds {token}, outside the vocabulary of {self.config.vocab_size} tokens")


def initialize(model: LanguageModel, seed: int) -> None:
    """Draw the initial weights; the same for a seed on every device.

    | parameter                                  | initial value                          |
    |--------------------------------------------|----------------------------------------|
    | embedding, matrices                        | N(0, init_std^2)                       |
    | projections that write to h                | N(0, init_std^2 / (2 N)), N the depth  |
    | norm weights, temperatures, other vectors  | as their module sets them (norms: 1)   |
    | buffers, behind all these                  | as their block draws them              |
    """
    draw(model, list(model.blocks), model.config, torch.Generator().manual_seed(seed))


@torch.no_grad()
def draw(module: nn.Module, blocks: list[Block], config: ModelConfig, generator: torch.Generator | None) -> None:
    """Draw the matrices of `module`, which holds `blocks`; without a generator from torch's own."""
    scaled = {linear.weight for block in blocks for linear in block.outputs()}
    for parameter in module.parameters():
        if parameter.ndim >= 2:
            std = config.init_std / math.sqrt(2 * config.depth) if parameter in scaled else config.init_std
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
    for block in blocks:
        block.draw_buffers(generator)


def supervised(
    labels: Int[Tensor, "B T"],
    attention_mask: Tensor | None = None,
    document_ids: Int[Tensor, "B T"] | None = None,
) -> Bool[Tensor, "B Tm1"]:
    """Which of the T - 1 predictions count: the target is not -100, and it and its predecessor are real and of one document."""
    counted = labels[:, 1:] != IGNORED
    if attention_mask is not None:
        mask = attention_mask.to(torch.bool)
        counted = counted & mask[:, 1:] & mask[:, :-1]
    if document_ids is not None:
        counted = counted & (document_ids[:, 1:] == document_ids[:, :-1])
    return counted


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))

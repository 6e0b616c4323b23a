"""Beam search: of K continuations a prompt at each step, those of the highest probability as a whole.

    score(tokens) = sum of ln p(token | what stands before it), the end token included, without a penalty on length

A finished beam (one that ended with the stop token) keeps its score and its place among the K. The search of a prompt is over
when its best beam is finished, since scores only fall, or at the limit of new tokens. With one beam it is greedy decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tangolm.evaluation.sampling import on_host
from tangolm.models import LanguageModel


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Prompts padded on the left to the longest, and which tokens are real. A pad's id is arbitrary: the mask hides it."""
    longest = max(len(prompt) for prompt in prompts)
    padded = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return padded, torch.arange(longest) >= (longest - lengths)[:, None]


@torch.no_grad()
def beam_search(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    beams: int,
    stop_token: int | None = None,
    *,
    cached: bool = True,
) -> list[list[int]]:
    """The best continuation of each prompt that a search with `beams` beams finds.

    Args:
        model: in evaluation mode; it stays on its device.
        prompts: token ids, at least one each.
        max_new_tokens: at most so many are added, at least 1.
        stop_token: ends a continuation and is not part of the result. None: no such token.
        cached: keep the state of each beam; otherwise the whole text is read again at each step, to the same end.

    Raises:
        ValueError: logits that are not numbers.
    """
    device = next(model.parameters()).device
    results: list[list[int]] = [[] for _ in prompts]
    padded, mask = left_padded(prompts)
    cache = model.new_cache(len(prompts)) if cached else None
    output = model(padded.to(device), attention_mask=None if mask.all() else mask.to(device), cache=cache)
    searched = torch.arange(len(prompts))  # the prompts whose search is not over
    tokens = torch.empty((len(prompts), 1, 0), dtype=torch.long)  # [prompts, beams, new tokens]
    scores = torch.zeros((len(prompts), 1), dtype=torch.float64)
    done = torch.zeros((len(prompts), 1), dtype=torch.bool)
    for step in range(1, max_new_tokens + 1):
        assert output.logits is not None
        logits = on_host(output.logits[:, -1], model.config.vocab_size).to(torch.float64)
        totals = scores[..., None] + logits.log_softmax(-1).reshape(*scores.shape, -1)
        if stop_token is not None:  # a finished beam goes on in one way only
            totals[done] = -torch.inf
            totals[..., stop_token] = torch.where(done, scores, totals[..., stop_token])
        # Sorted stably, so that of equal scores the better beam and the lower token come first, as with argmax.
        scores, chosen = (part[:, :beams] for part in totals.flatten(1).sort(dim=-1, descending=True, stable=True))
        parents, new = chosen // totals.shape[-1], chosen % totals.shape[-1]
        before = tokens.gather(1, parents[..., None].expand(-1, -1, step - 1))
        tokens = torch.cat([before, new[..., None]], dim=-1)
        done = new == stop_token if stop_token is not None else torch.zeros_like(new, dtype=torch.bool)
        over = done[:, 0] | (step == max_new_tokens)
        for prompt, best in zip(searched[over].tolist(), tokens[over, 0].tolist(), strict=True):
            results[prompt] = best[: best.index(stop_token)] if stop_token in best else best
        left = (~over).nonzero()[:, 0]
        if len(left) == 0:
            break
        rows = (left[:, None] * totals.shape[1] + parents[left]).flatten()
        searched, tokens, scores, done = searched[left], tokens[left], scores[left], done[left]
        if cache is not None:
            cache.reorder(rows.to(device))
            output = model(new[left].reshape(-1, 1).to(device), cache=cache)
        else:
            texts = torch.cat([padded[searched].repeat_interleave(new.shape[1], 0), tokens.flatten(0, 1)], dim=1)
            real = mask[searched].repeat_interleave(new.shape[1], 0)
            real = torch.cat([real, real.new_ones(len(real), step)], dim=1)
            output = model(texts.to(device), attention_mask=real.to(device))
    return results

"""Generation from a cache, and how many questions a model answers exactly.

Prompts of a batch are padded on the left; the cache then takes one token a row and step. A question counts as answered where
the generated tokens are exactly those of the answer, followed by the end token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tangolm.data.questions import Question
from tangolm.data.tokenizer import Tokenizer
from tangolm.evaluation.beam import beam_search, left_padded
from tangolm.evaluation.sampling import Sampling
from tangolm.models import LanguageModel, build_model

Progress = Callable[[int, int, str], None]


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_token: int | None = None,
    beams: int = 1,
) -> list[list[int]]:
    """Continue each prompt.

    Args:
        model: any; it stays on its device.
        prompts: token ids, at least one each, of any lengths.
        max_new_tokens: at most so many are added to each.
        temperature, top_k, top_p: as in `Sampling`; temperature 0 takes the most likely token.
        seed: of the sampled tokens. A row's tokens do not depend on the rows behind it.
        stop_token: ends a row; it is not part of the result. None: no such token.
        beams: above 1, search with so many continuations a prompt for the most likely one (`evaluation.beam`).

    Returns:
        The new tokens of each prompt.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, a sampling value out of range, beams that do not go with
            it.
    """
    sampling = Sampling(temperature, top_k, top_p)
    vocab_size = model.config.vocab_size
    _check(prompts, max_new_tokens, vocab_size, stop_token)
    if beams < 1:
        raise ValueError(f"beams must be at least 1, got {beams}")
    if beams > 1 and (temperature, top_k, top_p) != (0.0, None, None):
        raise ValueError(
            f"beams {beams} samples nothing and does not go with temperature {temperature}, top_k {top_k} and top_p {top_p}; "
            "give temperature 0 alone, or beams 1"
        )
    results: list[list[int]] = [[] for _ in prompts]
    if not prompts or max_new_tokens == 0:
        return results
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(len(prompts), max_new_tokens, generator=generator, dtype=torch.float64)
    padded, mask = left_padded(prompts)
    training = model.training
    model.eval()
    try:
        if beams > 1:
            return beam_search(model, prompts, max_new_tokens, beams, stop_token)
        with torch.no_grad():
            cache = model.new_cache(len(prompts))
            given = None if bool(mask.all()) else mask.to(device)
            output = model(padded.to(device), attention_mask=given, cache=cache)
            rows = torch.arange(len(prompts))  # of the prompts, those in the cache
            running = torch.ones(len(prompts), dtype=torch.bool)
            for step in range(max_new_tokens):
                assert output.logits is not None
                tokens = sampling.next_tokens(output.logits[:, -1], vocab_size, uniform[rows, step])
                if stop_token is not None:
                    running &= tokens != stop_token
                left = running.nonzero()[:, 0]
                for row, token in zip(rows[left].tolist(), tokens[left].tolist(), strict=True):
                    results[row].append(token)
                if step + 1 == max_new_tokens or len(left) == 0:
                    break
                if 2 * len(left) <= len(rows):  # worth a copy of what the cache holds
                    rows, running, tokens = rows[left], running[left], tokens[left]
                    cache.reorder(left.to(device))
                output = model(tokens[:, None].to(device), cache=cache)
    finally:
        model.train(training)
    return results


@dataclass(frozen=True)
class Answers:
    """Exact-match accuracy of generated answers.

    Args:
        accuracy: share of the questions answered exactly.
        correct, questions: counts.
        modules: the same three by module, empty where a split has none.
        samples: some questions with "module", "prompt", "answer", "generated" (as text) and "correct".
        untrained: accuracy of the same model before training; None where not asked for.
        commonest: accuracy of always giving the commonest answer of the module; None where not known.
    """

    accuracy: float
    correct: int
    questions: int
    modules: dict[str, dict[str, Any]]
    samples: list[dict[str, Any]]
    untrained: float | None
    commonest: float | None


def exact_match(
    model: LanguageModel,
    questions: Sequence[Question],
    tokenizer: Tokenizer,
    batch_size: int = 64,
    *,
    modules: Mapping[str, Mapping[str, Any]] | None = None,
    untrained_seed: int | None = None,
    samples: int = 20,
    progress: Progress | None = None,
) -> Answers:
    """Generate an answer to each question, greedily, and compare.

    Args:
        model: trained on such questions.
        questions: of `tangolm.data.questions`, at least one.
        tokenizer: of the data.
        batch_size: questions at a time.
        modules: `manifest["modules"]`, with the "commonest_answer" of each, for that baseline; None: without.
        untrained_seed: model seed, for the baseline of a model freshly built from it; None: without.
        samples: how many questions to show, evenly spaced.
        progress: called with (questions done, in all, what) now and then.

    Raises:
        ValueError: no questions.
    """
    if not questions:
        raise ValueError("questions is empty; take a split that holds questions")
    end = tokenizer.end_token
    generated = _answers(model, questions, end, batch_size, progress, "answering")
    hits = [tokens == [*question.answer_ids, end] for tokens, question in zip(generated, questions, strict=True)]
    untrained = None
    if untrained_seed is not None:
        fresh = build_model(model.config, untrained_seed, model.impl).to(next(model.parameters()).device)
        guesses = _answers(fresh, questions, end, batch_size, progress, "untrained baseline")
        untrained = _share([tokens == [*q.answer_ids, end] for tokens, q in zip(guesses, questions, strict=True)])
    known = None
    if modules is not None:
        constant = {module: tokenizer.encode(entry["commonest_answer"]) for module, entry in modules.items()}
        known = _share([constant.get(question.module or "") == question.answer_ids for question in questions])
    by_module: dict[str, list[bool]] = {}
    for question, hit in zip(questions, hits, strict=True):
        if question.module is not None:
            by_module.setdefault(question.module, []).append(hit)
    shown = sorted({index * len(questions) // max(1, samples) for index in range(min(samples, len(questions)))})
    return Answers(
        accuracy=_share(hits),
        correct=sum(hits),
        questions=len(hits),
        modules={
            module: {"accuracy": _share(own), "correct": sum(own), "questions": len(own)}
            for module, own in sorted(by_module.items())
        },
        samples=[
            {
                "module": questions[index].module,
                "prompt": tokenizer.decode(questions[index].prompt_ids),
                "answer": tokenizer.decode(questions[index].answer_ids),
                "generated": tokenizer.decode(generated[index]),
                "correct": hits[index],
            }
            for index in shown
        ],
        untrained=untrained,
        commonest=known,
    )


def _answers(
    model: LanguageModel,
    questions: Sequence[Question],
    end: int,
    batch_size: int,
    progress: Progress | None,
    what: str,
) -> list[list[int]]:
    """What the model says to each question, its end token included where it came."""
    results: list[list[int]] = [[] for _ in questions]
    # Prompts of about equal length go together: little padding, and batches of short questions are cheap.
    order = sorted(range(len(questions)), key=lambda index: len(questions[index].prompt_ids))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        # One token beyond the longest answer decides every question of the batch: what is longer is wrong anyway.
        limit = max(len(questions[index].answer_ids) for index in chosen) + 1
        answers = generate(model, [questions[index].prompt_ids for index in chosen], limit, stop_token=end)
        for index, tokens in zip(chosen, answers, strict=True):
            # A row shorter than the limit was ended by the end token.
            results[index] = [*tokens, end] if len(tokens) < limit else tokens
        if progress is not None:
            progress(min(start + batch_size, len(order)), len(order), what)
    return results


def _share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits)


def _check(prompts: Sequence[Sequence[int]], max_new_tokens: int, vocab_size: int, stop_token: int | None) -> None:
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    if stop_token is not None and not 0 <= stop_token < vocab_size:
        raise ValueError(f"stop_token {stop_token} is outside the vocabulary of {vocab_size} tokens")
    for number, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {number} is empty; begin with at least one token")
        for token in prompt:
            if not 0 <= token < vocab_size:
                raise ValueError(f"prompt {number} holds token {token}, outside the vocabulary of {vocab_size} tokens")

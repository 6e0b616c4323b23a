"""Beam search: the most likely continuation, found with the cache as without."""

from __future__ import annotations

import itertools

import pytest
import torch

from tangolm.evaluation.beam import beam_search
from tangolm.evaluation.generate import generate
from tangolm.models import LanguageModel
from tests.models.tiny import EVERY, build, livelier

PROMPTS = [[5, 11, 3], [7, 2, 9, 4, 1, 8, 6, 10, 90], [1]]


def log_probability(model: LanguageModel, prompt: list[int], tokens: list[int]) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].double()
    return float(logits.log_softmax(-1)[range(len(tokens)), tokens].sum())


@pytest.mark.case(14)
@pytest.mark.parametrize("family", EVERY)
def test_three_beams_with_the_cache_and_without(family: str) -> None:
    model = livelier(build(family)).eval()
    found = beam_search(model, PROMPTS, 12, 3)
    assert found == beam_search(model, PROMPTS, 12, 3, cached=False)
    assert found == generate(model, PROMPTS, 12, beams=3)
    assert found == [beam_search(model, [prompt], 12, 3)[0] for prompt in PROMPTS]
    stop = found[1][4]
    stopped = beam_search(model, PROMPTS, 12, 3, stop)
    assert stopped == beam_search(model, PROMPTS, 12, 3, stop, cached=False)
    assert all(stop not in tokens for tokens in stopped)
    for stop_token in (None, stop):
        assert beam_search(model, PROMPTS, 12, 1, stop_token) == generate(model, PROMPTS, 12, stop_token=stop_token)


@pytest.mark.parametrize("stop", [None, 0, 1, 2])
@pytest.mark.parametrize("family", ["tango", "loop", "windowed-tango"])
def test_with_as_many_beams_as_texts_the_likeliest_is_found(family: str, stop: int | None) -> None:
    model = livelier(build(family, vocab_size=4)).eval()
    prompt, length = [3, 1], 4
    texts = [list(text) for text in itertools.product(range(4), repeat=length)]
    if stop is not None:  # what follows the stop token does not count
        texts = [text[: text.index(stop) + 1] if stop in text else text for text in texts]
    best = max(texts, key=lambda text: log_probability(model, prompt, text))
    expected = best[:-1] if best[-1] == stop else best
    assert generate(model, [prompt], length, stop_token=stop, beams=4**length) == [expected]
    greedy = generate(model, [prompt], length)[0]
    assert log_probability(model, prompt, best) >= log_probability(model, prompt, greedy) or stop is not None


def test_more_beams_than_tokens_and_limits() -> None:
    model = build("loop", vocab_size=3).eval()
    assert len(generate(model, [[1, 2]], 1, beams=5)[0]) == 1
    assert generate(model, [[1, 2]], 0, beams=2) == [[]]
    assert generate(model, [], 3, beams=2) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beams": 0}, "beams must be at least 1, got 0"),
        ({"beams": 2, "temperature": 0.5}, "beams 2 samples nothing and does not go with temperature 0.5"),
        ({"beams": 2, "top_k": 3}, "top_k 3"),
        ({"beams": 2, "top_p": 0.5}, "top_p 0.5"),
    ],
)
def test_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(build("loop"), [[1]], 1, **options)  # type: ignore[arg-type]

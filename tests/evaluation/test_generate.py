"""Generation with the cache, and exact answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tangolm
from tangolm.data.questions import questions
from tangolm.data.shards import open_split
from tangolm.data.tokenizer import ByteTokenizer
from tangolm.evaluation.generate import exact_match, generate
from tangolm.models import LanguageModel

module = sys.modules["tangolm.evaluation.generate"]  # the package has the function under this name
PRESETS = ["tango-mini-d4", "loop-mini-d4", "untied-mini-d4"]


def small(preset: str, **fields: Any) -> LanguageModel:
    fields = {"vocab_size": 97, "context": 64, "depth": 2, "gated_width": 64, "init_std": 0.2, **fields}
    return tangolm.build_model(tangolm.preset(preset, **fields), seed=0)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 97, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("preset", PRESETS)
def test_greedy_is_the_argmax_of_the_full_pass(preset: str) -> None:
    model = small(preset)
    (prompt,) = prompts(5)
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(12):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert generate(model, [prompt], 12) == [tokens[5:]]
    assert len(set(tokens[5:])) > 1


@pytest.mark.case(12)
@pytest.mark.parametrize("preset", PRESETS)
def test_repeatable(preset: str) -> None:
    model, given = small(preset), prompts(4, 4)
    assert generate(model, given, 20) == generate(model, given, 20, seed=5)  # nothing is drawn at temperature 0
    sampled = generate(model, given, 20, temperature=1.0, top_k=500, seed=3)
    assert generate(model, given, 20, temperature=1.0, seed=3) == sampled
    assert generate(model, given, 20, temperature=1.0, seed=4) != sampled
    assert generate(model, given[:1], 20, temperature=1.0, seed=3) == sampled[:1]


@pytest.mark.case(1)
@pytest.mark.parametrize("preset", PRESETS)
def test_prompts_of_several_lengths_are_as_alone(preset: str) -> None:
    model, given = small(preset), prompts(3, 9, 1, 6)
    together = generate(model, given, 20)
    assert together == [generate(model, [prompt], 20)[0] for prompt in given]
    assert all(len(tokens) == 20 for tokens in together)


def test_rows_that_stopped_leave_the_others_as_they_were() -> None:
    model, given = small("tango-mini-d4"), prompts(3, 9, 1, 6, 2, 7)
    free = generate(model, given, 20)
    stop = free[0][2]
    expected = [tokens[: tokens.index(stop)] if stop in tokens else tokens for tokens in free]
    assert len(expected[0]) <= 2
    assert len({len(tokens) for tokens in expected}) > 1
    assert generate(model, given, 20, stop_token=stop) == expected


def test_a_row_that_stops_at_once_is_empty() -> None:
    model, given = small("tango-mini-d4"), prompts(3)
    (first,) = generate(model, given, 1)
    assert generate(model, given, 5, stop_token=first[0]) == [[]]
    assert generate(model, given, 0) == [[]]
    assert generate(model, [], 5) == []


@pytest.mark.case(34)
@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_padding_of_the_vocabulary_is_never_sampled(temperature: float) -> None:
    model = small("tango-mini-d4", vocab_multiple=128)
    assert model.embedding.weight.shape[0] == 128
    with torch.no_grad():
        # The final state is all ones then, and each added row wins by far.
        model.norm.weight.fill_(1.0)
        model.embedding.weight[97:] = 10.0 * torch.randn(31, 64, generator=torch.Generator().manual_seed(2))
    tokens = generate(model, prompts(4) * 16, 50, temperature=temperature, seed=1)
    assert sum(map(len, tokens)) == 800
    assert max(map(max, tokens)) <= 96


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, 97]], {}, "prompt 0 holds token 97, outside the vocabulary of 97"),
        ([[-1]], {}, "prompt 0 holds token -1"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens must be at least 0"),
        ([[1]], {"stop_token": 97}, "stop_token 97 is outside"),
        ([[1]], {"temperature": -1.0}, "temperature must be"),
    ],
)
def test_bad_arguments_are_refused_by_name(given: list[list[int]], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        generate(small("tango-mini-d4"), given, **{"max_new_tokens": 3, **options})


def test_the_model_stays_in_its_mode() -> None:
    model = small("tango-mini-d4").train()
    generate(model, prompts(3), 2)
    assert model.training


def test_exact_match_counts_what_is_right(model: LanguageModel, sums: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, asked = ByteTokenizer(), questions(open_split(sums, "test"))
    assert {question.module for question in asked} == {"add", "subtract"}
    answers = {tuple(question.prompt_ids): question.answer_ids for question in asked}
    batches = []

    def knows_addition(_: LanguageModel, given: list[list[int]], limit: int, stop_token: int) -> list[list[int]]:
        batches.append([len(prompt) for prompt in given])
        results = []
        for prompt in given:
            answer = answers[tuple(prompt)]
            wrong = [[*answer, 48], answer[:-1], [*answer[:-1], 65]][len(results) % 3]
            results.append((answer if ord("+") in prompt else wrong)[:limit])
        return results

    monkeypatch.setattr(module, "generate", knows_addition)
    told: list[tuple[int, int]] = []
    result = exact_match(
        model, asked, tokenizer, 7, samples=4, progress=lambda done, total, _: told.append((done, total))
    )
    assert (result.correct, result.questions) == (len(asked) // 2, len(asked))
    assert result.accuracy == 0.5
    assert {name: part["accuracy"] for name, part in result.modules.items()} == {"add": 1.0, "subtract": 0.0}
    assert (result.untrained, result.commonest) == (None, None)
    lengths = [length for batch in batches for length in batch]
    assert lengths == sorted(lengths)  # about equal lengths go together
    assert told[-1] == (len(asked), len(asked))
    assert len(result.samples) == 4
    assert {sample["module"] for sample in result.samples} == {"add", "subtract"}
    for sample in result.samples:
        assert sample["correct"] == (sample["answer"] == sample["generated"]) == ("+" in sample["prompt"])


def test_an_answer_that_goes_on_is_wrong(model: LanguageModel, sums: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = questions(open_split(sums, "test"))
    answers = {tuple(question.prompt_ids): question.answer_ids for question in asked}

    def endless(_: LanguageModel, given: list[list[int]], limit: int, stop_token: int) -> list[list[int]]:
        return [(answers[tuple(prompt)] + [48] * limit)[:limit] for prompt in given]

    monkeypatch.setattr(module, "generate", endless)
    assert exact_match(model, asked, ByteTokenizer()).correct == 0


def test_baselines(model: LanguageModel, sums: Path) -> None:
    tokenizer, asked = ByteTokenizer(), questions(open_split(sums, "test"))
    commonest = tokenizer.decode(asked[0].answer_ids)
    modules = {"add": {"commonest_answer": commonest}, "subtract": {"commonest_answer": "no number"}}
    result = exact_match(model, asked, tokenizer, modules=modules, untrained_seed=0)
    times = sum(q.module == "add" and q.answer_ids == asked[0].answer_ids for q in asked)
    assert times >= 1
    assert result.commonest == times / len(asked)
    assert result.untrained == result.accuracy  # this model is the untrained one
    with pytest.raises(ValueError, match="questions is empty"):
        exact_match(model, [], tokenizer)


def test_a_model_that_knows_the_answer_is_found_right(model: LanguageModel, sums: Path) -> None:
    """Trained on a single question until it says it."""
    asked = questions(open_split(sums, "test"))[:1]
    tokens = torch.tensor([[*asked[0].prompt_ids, *asked[0].answer_ids, ByteTokenizer.end_token]])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
    assert exact_match(model, asked, ByteTokenizer(), untrained_seed=0).accuracy == 1.0

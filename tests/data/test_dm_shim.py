from __future__ import annotations

import math
import random
import re
from fractions import Fraction

import numpy as np
import pytest

from tangolm.data import dm_shim
from tangolm.data.dm_shim import LEVELS, MAX_ANSWER, MAX_QUESTION, example, generators_kept, samplers


def drawn(module: str, level: str, count: int = 40) -> list[tuple[str, str]]:
    with generators_kept():
        return [example(5, "train", module, level, index)[:2] for index in range(count)]


def test_there_are_56_modules_at_three_levels_and_as_many_in_the_test() -> None:
    names = [list(samplers(level)) for level in (*LEVELS, "interpolate")]
    assert len(names[0]) == 56
    assert all(other == names[0] == sorted(names[0]) for other in names)


@pytest.mark.parametrize(
    ("level", "expected"), [("easy", (3, 16 / 3)), ("medium", (16 / 3, 23 / 3)), ("hard", (23 / 3, 10))]
)
def test_a_level_draws_from_its_third_of_the_entropy(level: str, expected: tuple[float, float]) -> None:
    arguments = samplers(level)["numbers__gcd"].args[1]  # pyright: ignore
    assert (arguments.min_entropy, arguments.max_entropy) == pytest.approx(expected)
    interpolate = samplers("interpolate")["numbers__gcd"].args[1]  # pyright: ignore
    assert (interpolate.min_entropy, interpolate.max_entropy) == (8, 8)


@pytest.mark.parametrize("level", [*LEVELS, "interpolate"])
def test_every_module_draws_questions_of_plain_text(level: str) -> None:
    for module in samplers(level):
        for question, answer in drawn(module, level, 2):
            assert 0 < len(question) <= MAX_QUESTION
            assert 0 < len(answer) <= MAX_ANSWER
            assert (question + answer).isascii()
            assert (question + answer).isprintable()
            assert "np." not in question + answer  # numpy 2 shows its numbers as np.int64(3) inside lists


@pytest.mark.parametrize("level", [*LEVELS, "interpolate"])
def test_answers_are_right(level: str) -> None:
    checked = 0
    for question, answer in drawn("algebra__linear_1d", level):
        match = re.fullmatch(r"Solve (.*) = (.*) for (\w)\.", question)
        assert match is not None, question
        left, right = (eval(side, {match[3]: Fraction(answer)}) for side in match.groups()[:2])
        assert left == right, question
        checked += 1
    for question, answer in drawn("numbers__gcd", level):
        first, second = map(int, re.findall(r"\d+", question))
        assert math.gcd(first, second) == int(answer), question
        checked += 1
    for question, answer in drawn("arithmetic__mul", level):
        numbers = re.findall(r"-?\d+(?:\.\d+)?", question)
        assert Fraction(numbers[0]) * Fraction(numbers[1]) == Fraction(answer), question
        checked += 1
    for question, answer in drawn("polynomials__expand", level, 10):
        expression = question.removeprefix("Expand ").removesuffix(".")
        (variable,) = set(re.findall("[a-z]", expression))
        for value in (-3, 2, 11):
            assert eval(expression, {variable: value}) == eval(answer, {variable: value}), question
        checked += 1
    assert checked == 130


def test_an_example_does_not_depend_on_what_was_drawn_before() -> None:
    modules = ("numbers__gcd", "polynomials__add", "algebra__linear_2d_composed", "probability__swr_p_level_set")
    keys = [(module, level, index) for module in modules for level in ("hard", "interpolate") for index in range(6)]
    with generators_kept():
        forward = {key: example(5, "train", *key) for key in keys}
        backward = {key: example(5, "train", *key) for key in reversed(keys)}
    assert forward == backward
    assert len(set(forward.values())) > len(keys) * 0.9


def test_each_part_of_an_examples_name_changes_it() -> None:
    with generators_kept():
        names = [(5, "train", "numbers__lcm", "hard", 0), (6, "train", "numbers__lcm", "hard", 0)]
        names += [(5, "dev", "numbers__lcm", "hard", 0), (5, "train", "numbers__lcm", "easy", 0)]
        names += [(5, "train", "numbers__lcm", "hard", 1), (5, "train", "numbers__gcd", "hard", 0)]
        assert len({example(*name) for name in names}) == len(names)


def test_the_order_of_prime_factors_is_forgotten() -> None:
    import sympy

    def order(number: int) -> list[int]:
        return list(sympy.factorint(number))

    number = 40637 * 41579
    with generators_kept():
        example(5, "train", "numbers__gcd", "easy", 0)
        first = order(number)
        again = order(number)  # sympy 1.14 remembers the largest factor and then finds it first
        example(5, "train", "numbers__gcd", "easy", 0)
        assert order(number) == first
    if hasattr(sympy, "factor_cache"):
        assert again != first, "choose another number: this one does not show the fault"


def test_nothing_outside_the_package_is_changed() -> None:
    from sympy.core.random import rng

    samplers("easy")
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), rng.getstate()  # pyright: ignore
    drawn("numbers__is_prime_composed", "hard", 3)
    assert (random.getstate(), np.random.get_state()[1].tolist(), rng.getstate()) == before  # pyright: ignore
    import sympy.solvers.diophantine as diophantine

    assert not hasattr(diophantine, "base_solution_linear")
    assert "object" not in vars(np)
    assert not hasattr(np.zeros(2), "itemset")


def test_a_draw_that_fails_is_drawn_again_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from mathematics_dataset.example import Problem

    draws = iter(range(100))

    def dead_end(below: int) -> Problem:
        number = next(draws)
        assert number >= below, "a dead end"
        return Problem("q" * (200 if number == below else 20), number)

    monkeypatch.setattr(dm_shim, "samplers", lambda level: {"m": lambda: dead_end(7)})
    with generators_kept():
        assert example(0, "train", "m", "easy", 0) == ("q" * 20, "8", 1, 7)
        monkeypatch.setattr(dm_shim, "samplers", lambda level: {"m": lambda: dead_end(10**6)})
        with pytest.raises(ValueError, match=r"module 'm' cannot be drawn .*a dead end"):
            example(0, "train", "m", "easy", 0)


def test_whole_floats_are_taken_by_the_one_module_that_draws_from_them() -> None:
    assert 1 <= dm_shim._Random().randint(1.0, 3.0) <= 3
    assert len(drawn("numbers__round_number", "hard", 10)) == 10

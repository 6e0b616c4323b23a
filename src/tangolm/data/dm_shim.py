"""The `mathematics_dataset` generator on current Python, numpy and sympy, drawing the same questions everywhere.

Version 1.0.1 of the package is of 2019. What is mended, each in the module that needs it and nowhere else:

- `base_solution_linear` moved inside `sympy.solvers.diophantine`;
- `numpy.object` and `ndarray.itemset` are gone;
- `random.randint` no longer takes whole floats (Python 3.12);
- the order of two sets follows the hash seed (free symbols) and object addresses (entities);
- sympy remembers prime factors, and with them the order in which `factorint` lists the next ones.

Its `generate` module defines command-line flags at import and is not used; the ranges of difficulty are those it states.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

LEVELS = ("easy", "medium", "hard")
MAX_QUESTION, MAX_ANSWER = 160, 30  # characters; longer ones are drawn again, as the package does
MAX_FAILURES = 10  # draws of one example that may fail
PACKAGES = ("mathematics_dataset", "sympy", "numpy")


class Example(NamedTuple):
    """A question, its answer, and the draws before it that were longer than the caps or that the package failed in."""

    question: str
    answer: str
    too_long: int
    failed: int


class _SortedSet(frozenset[str]):
    """A set that is iterated in sorted order."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__()))

    def difference(self, *others: Any) -> _SortedSet:
        return _SortedSet(super().difference(*others))


class _Array(np.ndarray):
    def itemset(self, index: Any, value: Any) -> None:
        self[index] = value


class _Numpy:
    """numpy with what the package expects of an older one."""

    object = object

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def zeros(self, shape: Any, dtype: Any = float) -> np.ndarray:
        return np.zeros(shape, dtype).view(_Array)

    def empty(self, shape: Any, dtype: Any = float) -> np.ndarray:
        return np.empty(shape, dtype).view(_Array)


class _Random:
    def __getattr__(self, name: str) -> Any:
        return getattr(random, name)

    def randint(self, low: Any, high: Any) -> int:
        return random.randint(int(low), int(high))


@functools.cache
def modules() -> ModuleType:
    """The package's `modules.modules`, mended.

    Raises:
        ValueError: the package or sympy is not installed.
    """
    try:
        diophantine = importlib.import_module("sympy.solvers.diophantine")
        inner = importlib.import_module("sympy.solvers.diophantine.diophantine")
        moved = not hasattr(diophantine, "base_solution_linear")
        if moved:
            diophantine.base_solution_linear = inner.base_solution_linear  # pyright: ignore[reportAttributeAccessIssue]
        try:
            result = importlib.import_module("mathematics_dataset.modules.modules")
        finally:
            if moved:
                del diophantine.base_solution_linear  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError as error:
        raise ValueError(
            f"generating mathematics needs {error.name!r}; install it with: pip install 'tangolm[data]'"
        ) from error
    importlib.import_module("mathematics_dataset.sample.polynomials").np = _Numpy()  # pyright: ignore[reportAttributeAccessIssue]
    importlib.import_module("mathematics_dataset.modules.numbers").random = _Random()  # pyright: ignore[reportAttributeAccessIssue]
    composition: Any = importlib.import_module("mathematics_dataset.util.composition")
    composition._ALLOWED_SYMBOLS = _SortedSet(composition._ALLOWED_SYMBOLS)
    composition.Entity.__hash__ = lambda self: zlib.crc32(f"{self._child_description}\0{self._description}".encode())
    return result


@functools.cache
def samplers(level: str) -> Mapping[str, Callable[[], Any]]:
    """The question makers by module name, sorted: "easy", "medium" and "hard" for training, "interpolate" for the test.

    A training level draws from its third of each module's range of entropy, as the package's own generator does.
    """
    if level == "interpolate":
        tree = modules().test()
    else:
        third = LEVELS.index(level)
        tree = modules().train(lambda range_: _third(range_, third))
    return dict(sorted(_flat(tree)))


def _third(range_: tuple[float, float], third: int) -> tuple[float, float]:
    low, high = range_
    return low + third / 3 * (high - low), low + (third + 1) / 3 * (high - low)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}__")
        else:
            yield prefix + name, value


def example(seed: int, split: str, module: str, level: str, index: int) -> Example:
    """The example that these five values name.

    Sets the global generators of `random`, numpy and sympy: call it inside `generators_kept`.

    Raises:
        ValueError: the package fails again and again, as it would with a sympy or numpy that it cannot use.
    """
    make = samplers(level)[module]
    key = hashlib.sha256(f"{seed}/{split}/{module}/{level}/{index}".encode()).digest()
    random.seed(int.from_bytes(key[:8], "big"))
    np.random.seed(np.frombuffer(key[8:24], dtype=">u4").astype(np.uint32))
    _sympy_random().seed(int.from_bytes(key[24:], "big"))
    _forget_factors()
    too_long = failed = 0
    while True:
        try:
            problem = make()
            question, answer = str(problem.question), str(problem.answer)
        except Exception as error:  # its samplers have rare dead ends, such as an assertion on a sum of rounded numbers
            failed += 1
            if failed > MAX_FAILURES:
                raise ValueError(
                    f"module {module!r} cannot be drawn ({error!r}); install the sympy and numpy of constraints.txt"
                ) from error
            continue
        if len(question) <= MAX_QUESTION and len(answer) <= MAX_ANSWER:
            return Example(question, answer, too_long, failed)
        too_long += 1


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the global generators of `random`, numpy and sympy afterwards."""
    sympy_random = _sympy_random()
    states = random.getstate(), np.random.get_state(), sympy_random.rng.getstate()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        sympy_random.rng.setstate(states[2])


@functools.cache
def _sympy_random() -> Any:
    modules()
    return importlib.import_module("sympy.core.random")


def _forget_factors() -> None:
    cache = getattr(_factorisation(), "factor_cache", None)  # sympy 1.14 and later
    if cache is not None:
        cache.cache_clear()


@functools.cache
def _factorisation() -> Any:
    return importlib.import_module("sympy.ntheory.factor_")

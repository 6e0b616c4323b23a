"""Mathematics questions from the generator, in worker processes, the same whatever their number.

An example is named by seed, split, module, level and index; the processes only share the work out. A training question
that is also a development or test question is passed over, and the next index takes its place.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial

from tangolm.config import suggest
from tangolm.data import dm_shim
from tangolm.data.dm_shim import LEVELS, Example
from tangolm.data.dm_spill import Spill
from tangolm.data.source import Progress
from tangolm.data.workers import runner

CHUNK = 16  # examples a task: some 0.1 s of work
Task = tuple[str, str, str, tuple[int, ...]]  # split, module, level, indices
Drawn = list[Example]

# What the generator drew when this was recorded: other versions may draw another stream, and then say so.
RECORDED = {
    "sympy": "1.14.0",
    "numpy": "2.4.6",
    "sha256": "502400b6010556d893e0f68e8a72d368eeb17f7d61d4e3090157e2dd92a0884c",
}


def known_modules(wanted: tuple[str, ...]) -> list[str]:
    """The modules asked for, sorted; all 56 where none is.

    Raises:
        ValueError: a module that the package does not have.
    """
    names = list(dm_shim.samplers("interpolate"))
    for name in wanted:
        if name not in names:
            raise ValueError(f"modules has {name!r}, which is no module of mathematics{suggest(name, names)}")
    return sorted(set(wanted)) or names


def generate(
    spill: Spill, modules: list[str], seed: int, counts: dict[str, int], workers: int, progress: Progress
) -> dict[str, object]:
    """Fill `spill` with test, development and training questions, in that order.

    Args:
        counts: questions a module of "test" and of "dev" (levels in turn), questions a module and level of "train".

    Returns:
        What the manifest says of it: counts of what was passed over, and whether the stream is the one recorded.

    Raises:
        ValueError: a source that has too few different questions; a worker process that died.
    """
    total = len(modules) * (counts["test"] + counts["dev"] + len(LEVELS) * counts["train"])
    passed = Counter(too_long=0, failed=0, in_test=0, in_dev_or_test=0)
    held: set[bytes] = set()

    def fill(split: str, wanted: dict[tuple[str, str], list[int]], limit: int, reason: str) -> None:
        """Draw until each (module, level) has as many questions as indices; `held` ones are replaced by later indices."""
        later = {key: max(indices, default=-1) + 1 for key, indices in wanted.items()}
        while any(wanted.values()):
            short: Counter[tuple[str, str]] = Counter()
            for (_, module, level, _), drawn in run(_tasks(split, wanted)):
                source = f"{module}-{level}" if split == "train" else module
                kept = []
                for question, answer, too_long, failed in drawn:
                    passed.update(too_long=too_long, failed=failed)
                    if _hash(question) in held:
                        passed[reason] += 1
                        short[module, level] += 1
                    else:
                        kept.append((question, answer))
                spill.append(split, source, kept)
                progress(spill.total, total, "generating questions")
            wanted = {key: list(range(later[key], later[key] + missing)) for key, missing in short.items()}
            for key, indices in wanted.items():
                later[key] += len(indices)
                if later[key] > limit:
                    raise ValueError(
                        f"{key[0]}-{key[1]} has too few different questions; ask for fewer, or leave it out"
                    )

    with runner(partial(_draw, seed=seed), workers, "generating questions") as run:
        stream = _stream(next(iter(run([("golden", "", "", ())])))[1])
        for split, count in (("test", counts["test"]), ("dev", counts["dev"])):
            levels = ("interpolate",) if split == "test" else LEVELS
            wanted = {(m, lv): list(range(i, count, len(levels))) for m in modules for i, lv in enumerate(levels)}
            fill(split, wanted, 100 * count + 1000, "in_test")
            held.update(_hash(question) for module in modules for question, _ in spill.read(split, module))
        wanted = {(module, level): list(range(counts["train"])) for module in modules for level in LEVELS}
        fill("train", wanted, 100 * counts["train"] + 1000, "in_dev_or_test")
    return {"stream": stream, "passed_over": dict(passed)}


def golden_digest() -> str:
    """The sha256 of one question of each module from the hardest training level and from the test."""
    digest = hashlib.sha256()
    with dm_shim.generators_kept():
        for level in ("hard", "interpolate"):
            for module in dm_shim.samplers(level):
                drawn = dm_shim.example(0, "golden", module, level, 0)
                digest.update(f"{drawn.question}\n{drawn.answer}\n{drawn.too_long}\n".encode())
    return digest.hexdigest()


def _stream(drawn: Drawn) -> str:
    if drawn[0].question == RECORDED["sha256"]:
        return "as recorded"
    text = f"differs from the one recorded with sympy {RECORDED['sympy']}, numpy {RECORDED['numpy']}"
    warnings.warn(f"the stream of generated questions {text}; results on them compare with no others", stacklevel=2)
    return text


def _tasks(split: str, wanted: dict[tuple[str, str], list[int]]) -> Iterator[Task]:
    for (module, level), indices in wanted.items():
        for start in range(0, len(indices), CHUNK):
            yield split, module, level, tuple(indices[start : start + CHUNK])


def _draw(task: Task, seed: int) -> Drawn:
    split, module, level, indices = task
    if split == "golden":
        return [Example(golden_digest(), "", 0, 0)]
    with dm_shim.generators_kept():
        return [dm_shim.example(seed, split, module, level, index) for index in indices]


def _hash(question: str) -> bytes:
    return hashlib.blake2b(question.encode(), digest_size=16).digest()

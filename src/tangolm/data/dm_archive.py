"""The layout of DeepMind Mathematics' published archive, as a folder or a tarball, read line by line.

`train-easy/<module>.txt`, `train-medium`, `train-hard` and `interpolate` hold a question a line and its answer on the next.
Nothing is unpacked: a tarball is read as a stream, twice (the test questions must be known before the training ones).
"""

from __future__ import annotations

import gzip
import hashlib
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from tangolm.config import suggest
from tangolm.data.dm_shim import LEVELS, MAX_ANSWER, MAX_QUESTION
from tangolm.data.dm_spill import Spill
from tangolm.data.source import Progress

DEV_ONE_IN = 64  # training questions held out for development, chosen by the hash of their text
LONGEST_LINE = 2**16
FOLDERS = tuple(f"train-{level}" for level in LEVELS)
_MODULE = re.compile(r"([a-z][a-z0-9_]*)\.txt")


def read_archive(
    spill: Spill, source: Path, modules: tuple[str, ...], counts: dict[str, int | None], progress: Progress
) -> dict[str, object]:
    """Fill `spill` from the archive at `source`.

    Args:
        modules: which; all of the archive where empty.
        counts: as for generated questions; None takes all there are.

    Returns:
        What the manifest says of it: counts of what was passed over.

    Raises:
        ValueError: another layout, a damaged or unsafe archive, an odd number of lines, an empty line; file and line named.
    """
    passed = Counter(too_long=0, in_test=0, held_out=0)
    test: set[bytes] = set()
    seen: dict[str, set[str]] = {folder: set() for folder in ("interpolate", *FOLDERS)}
    with _readable(source):
        for folder, module, pairs in _files(source, ("interpolate",)):
            _note(seen, folder, module)
            if not modules or module in modules:
                kept = []
                for question, answer in pairs:
                    if _too_long(question, answer):
                        passed["too_long"] += 1
                        continue
                    if len(kept) == counts["test"]:
                        break
                    kept.append((question, answer))
                    test.add(_hash(question))
                spill.append("test", module, kept)
                progress(spill.total, 0, "reading interpolate")
        for folder, module, pairs in _files(source, FOLDERS):
            _note(seen, folder, module)
            if not modules or module in modules:
                _training(spill, folder, module, pairs, test, counts, passed)
                progress(spill.total, 0, f"reading {folder}")
    _check(seen, modules, source)
    return {"passed_over": dict(passed)}


def _training(
    spill: Spill,
    folder: str,
    module: str,
    pairs: Iterator[tuple[str, str]],
    test: set[bytes],
    counts: dict[str, int | None],
    passed: Counter[str],
) -> None:
    level = FOLDERS.index(folder)
    dev_limit = None if counts["dev"] is None else len(range(level, counts["dev"], len(LEVELS)))
    batches: dict[tuple[str, str], list[tuple[str, str]]] = {
        ("dev", module): [],
        ("train", f"{module}-{LEVELS[level]}"): [],
    }
    limits = dict(zip(batches, (dev_limit, counts["train"]), strict=True))
    taken = dict.fromkeys(batches, 0)
    for question, answer in pairs:
        if all(taken[key] == limits[key] for key in batches):
            break
        key = list(batches)[int.from_bytes(_hash(question)[:8], "big") % DEV_ONE_IN != 0]
        if _too_long(question, answer):
            passed["too_long"] += 1
        elif _hash(question) in test:
            passed["in_test"] += 1
        elif taken[key] == limits[key]:
            passed["held_out"] += key[0] == "dev"
        else:
            batches[key].append((question, answer))
            taken[key] += 1
            if len(batches[key]) == 4096:
                spill.append(*key, batches[key])
                batches[key].clear()
    for key, batch in batches.items():
        spill.append(*key, batch)


def _check(seen: dict[str, set[str]], modules: tuple[str, ...], source: Path) -> None:
    for folder, names in seen.items():
        if not names:
            layout = "mathematics_dataset-v1.0/train-easy/<module>.txt, train-medium, train-hard, interpolate"
            raise ValueError(f"source {str(source)!r} has no {folder}/<module>.txt; the layout read is {layout}")
    every = sorted(set[str]().union(*seen.values()))
    for name in modules:
        if name not in every:
            raise ValueError(f"modules has {name!r}, which {str(source)!r} does not hold{suggest(name, every)}")
    for name in modules or every:
        for folder, names in seen.items():
            if name not in names:
                raise ValueError(
                    f"source {str(source)!r} has no {folder}/{name}.txt; leave that module out with modules"
                )


def _note(seen: dict[str, set[str]], folder: str, module: str) -> None:
    if module in seen[folder]:
        raise ValueError(f"source holds {folder}/{module}.txt twice; keep one of them")
    seen[folder].add(module)


def _files(source: Path, folders: tuple[str, ...]) -> Iterator[tuple[str, str, Iterator[tuple[str, str]]]]:
    """(folder, module, its questions and answers), the questions to be read before the next file is asked for."""
    yield from _folder_files(source, folders) if source.is_dir() else _tar_files(source, folders)


def _folder_files(source: Path, folders: tuple[str, ...]) -> Iterator[tuple[str, str, Iterator[tuple[str, str]]]]:
    root = source.resolve()
    inner = root / "mathematics_dataset-v1.0"
    root = inner if inner.is_dir() else root
    for folder in folders:
        for path in sorted((root / folder).glob("*.txt")):
            match = _MODULE.fullmatch(path.name)
            if match is None:
                continue
            if not path.resolve().is_relative_to(root):
                raise ValueError(f"source {str(path)!r} is a link that leads out of the folder; copy the file instead")
            with path.open("rb") as file:
                yield folder, match[1], _pairs(file, str(path))


def _tar_files(source: Path, folders: tuple[str, ...]) -> Iterator[tuple[str, str, Iterator[tuple[str, str]]]]:
    # gzip checks the sum behind the data, which tarfile's own reader of a compressed stream does not.
    with source.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        with gzip.open(raw) if packed else raw as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                where = f"{source}:{member.name}"
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
                    raise ValueError(
                        f"source {where!r} is a link, a device or leads out of the archive; it is not read"
                    )
                match = _MODULE.fullmatch(path.name)
                if member.isfile() and match is not None and path.parent.name in folders and len(path.parts) <= 3:
                    file = archive.extractfile(member)
                    assert file is not None
                    yield path.parent.name, match[1], _pairs(file, where)
            while stream.read(2**20):
                pass


@contextmanager
def _readable(source: Path) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise ValueError(f"source {str(source)!r} is damaged or no archive ({error}); fetch it again") from error


def _pairs(file: IO[bytes], where: str) -> Iterator[tuple[str, str]]:
    number = 1
    while line := file.readline(LONGEST_LINE):
        question = _text(line, where, number)
        answer = file.readline(LONGEST_LINE)
        if not answer:
            raise ValueError(f"source {where!r} line {number}: a question without an answer (an odd number of lines)")
        yield question, _text(answer, where, number + 1)
        number += 2


def _text(line: bytes, where: str, number: int) -> str:
    if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
        raise ValueError(f"source {where!r} line {number} is longer than {LONGEST_LINE} bytes")
    try:
        text = line.rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"source {where!r} line {number} is no UTF-8 (byte {line[error.start]:#04x})") from error
    if not text.strip():
        raise ValueError(f"source {where!r} line {number} is empty; questions and answers must alternate")
    return text


def _too_long(question: str, answer: str) -> bool:
    return len(question) > MAX_QUESTION or len(answer) > MAX_ANSWER


def _hash(question: str) -> bytes:
    return hashlib.sha256(question.encode()).digest()[:16]

"""Lean 4: its source text as a stream, or proofs to complete; from a folder of `.lean` files or JSON lines.

Task `source`: a document is a file; loss is on all of it. Task `proof`: a document is a theorem or lemma, its statement the
prompt; loss is on the proof and the end token, and whole documents are packed into rows, masked from each other. What
leaves something unproven (`sorry`, `admit`) is in neither. Both tasks put a file into the same split.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from tangolm.config import suggest
from tangolm.data.held_out import check_fractions, place_of, split_at
from tangolm.data.lean_cut import cut, unproven
from tangolm.data.lean_records import Statement, file_of, read, statements
from tangolm.data.pipeline import Document, Worked, write
from tangolm.data.records import BOM, JSON_LINES, RecordError, lines, parse, suffix
from tangolm.data.seen import key
from tangolm.data.source import Progress, at_least, check_context, existing, no_progress, option
from tangolm.data.tokenizer import CHOICES, Tokenizer, get_tokenizer

NAME = "lean"
LARGEST = 2**24  # bytes of a source file; one is held in memory as a whole
LISTED = 20  # theorems of a file that could not be cut and are named


@dataclass(frozen=True)
class LeanOptions:
    """Options of `prepare lean`; patterns are compared with every part of a path."""

    task: Literal["proof", "source"] = option("proof", "proof: complete proofs; source: model source text")
    before: int = option(
        0, "proof: begin a prompt with up to so many bytes of its file that stand before the statement"
    )
    context: int = option(
        1024, "tokens a row, at least 16; longer proofs are passed over, longer prompts lose their start"
    )
    tokenizer: str = option("bytes", CHOICES)
    exclude: tuple[str, ...] = option((".*", "build", "lake-packages"), "patterns: files and folders left out")
    dev_fraction: float = option(0.05, "part of the files for development")
    test_fraction: float = option(0.05, "part of the files for the test")
    document_masking: bool = option(False, "source: keep files in a row from seeing each other (proofs never do)")
    on_error: Literal["fail", "skip"] = option("fail", "what a line that holds no record does; skip counts it")
    workers: int | None = option(None, "processes; one a core where not given")

    def __post_init__(self) -> None:
        check_context(self.context, 16)
        at_least(0, before=self.before)
        at_least(1, workers=self.workers)
        get_tokenizer(self.tokenizer)
        for name, known in (("task", ("proof", "source")), ("on_error", ("fail", "skip"))):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name} {value!r} is not known{suggest(value, known)}")
        check_fractions(self.dev_fraction, self.test_fraction)
        if self.task == "source" and self.before:
            raise ValueError(f"before is of the task 'proof', got {self.before} with the task 'source'")

    def split(self, place: str) -> str:
        """The split of a file, by a hash of its path below the source."""
        return split_at(place_of(place.encode("utf-8", "surrogatepass")), self.dev_fraction, self.test_fraction)


@dataclass(frozen=True)
class _Item:
    """A file of source text, or where `line` is above 0 a line of JSON."""

    name: str
    line: int
    data: bytes


def prepare(
    source: str | Path | None,
    out: str | Path,
    options: LeanOptions | None = None,
    progress: Progress = no_progress,
    *,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Prepare Lean source text or proofs in `out`.

    Args:
        source: a folder of `.lean` files or of JSON lines, or one such file.

    Returns:
        The manifest. `passed_over` counts what a plain search of lines finds (`theorem_lines`, outside of comments and
        strings), what was cut (`theorems`) and what was not (`not_cut`, and each of them by file, line and first words),
        and what was left out: `sorry`, `copies`, `too_long`, `empty`, `not_utf8`, `too_large`, `links`.

    Raises:
        ValueError: an option, a source or a folder that cannot be used; a line of JSON that is no record of a known schema,
            unless it is skipped; a split that would be empty.
    """
    options = options or LeanOptions()
    root = existing(source, NAME)
    passed = Counter(links=0, too_large=0)
    files = _files(root, options, passed)
    if not files:
        endings = ", ".join((".lean", *JSON_LINES))
        raise ValueError(f"source {str(root)!r} holds no file of {endings} that can be read; name another")
    return write(
        out,
        NAME,
        options,
        items=partial(_items, files),
        work=partial(_work, options=options),
        weigh=lambda item: len(item.data),
        tokenizer=options.tokenizer,
        document_masking=options.document_masking or options.task == "proof",
        workers=options.workers,
        whole_documents=options.task == "proof",
        total=sum(size for _, _, size in files) if options.task == "source" else 0,
        passed_over=passed,
        identity=[(name, size) for _, name, size in files],
        facts={"generated": False},
        progress=progress,
        overwrite=overwrite,
    )


def _files(root: Path, options: LeanOptions, passed: Counter[str]) -> list[tuple[Path, str, int]]:
    """(path, name below the source, size) of the files to read, by name; links are not followed."""
    if root.is_file():
        found = [(root, root.name)]
    else:
        found = []
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if not _matches(name, options.exclude)]
            found += [(Path(folder) / name, name) for name in names if not _matches(name, options.exclude)]
    files = []
    for path, name in found:
        if path.suffix != ".lean" and suffix(path) not in JSON_LINES:
            continue
        if path.is_symlink() and path != root:
            passed["links"] += 1
        elif path.suffix == ".lean" and path.stat().st_size > LARGEST:
            passed["too_large"] += 1
        elif path.is_file():
            relative = name if path == root else path.relative_to(root).as_posix()
            files.append((path, relative, path.stat().st_size))
    return sorted(files, key=lambda file: file[1])


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _items(files: list[tuple[Path, str, int]], start: int) -> Iterator[_Item]:
    def all_items() -> Iterator[_Item]:
        for path, name, _ in files:
            if suffix(path) in JSON_LINES:
                yield from (_Item(name, number, line) for number, line in lines(path))
            else:
                try:
                    yield _Item(name, 0, path.read_bytes())
                except OSError as error:
                    raise ValueError(f"source {str(path)!r} cannot be read ({error.strerror}); exclude it") from error

    return islice(all_items(), start, None)


def _work(item: _Item, options: LeanOptions) -> Worked:
    counts: Counter[str] = Counter()
    try:
        if item.line:
            where = f"{item.name!r} line {item.line}"
            record = parse(item.data, where)
            text, given = read(record, where)
            place = file_of(record, text)
        else:
            text, given, place = item.data.removeprefix(BOM).decode(), None, item.name
    except UnicodeDecodeError:
        return Worked((), {"not_utf8": 1})
    except RecordError:
        if options.on_error == "fail":
            raise
        return Worked((), {"bad_lines": 1})
    if not text.strip():
        return Worked((), {"empty": 1})
    split = options.split(place)
    if options.task == "source":
        if unproven(text):
            return Worked((), {"sorry": 1})
        return Worked((_document(split, text.encode(), 0),))
    found = [given] if given else _cut(text, item, options, counts)
    coder, documents = get_tokenizer(options.tokenizer), []
    for one in found:
        if one.sorry:
            counts["sorry"] += 1
            continue
        proof = one.proof.encode()
        prompt = _fitted(_prompt(one, options.before), proof, options.context, coder, counts)
        if prompt:
            documents.append(_document(split, prompt + proof, len(prompt)))
        else:
            counts["too_long"] += 1
    return Worked(tuple(documents), counts)


def _cut(text: str, item: _Item, options: LeanOptions, counts: Counter[str]) -> list[Statement]:
    found = cut(text)
    counts.update(
        theorem_lines=found.searched,
        theorem_lines_in_comments=found.hidden,
        theorems=len(found.theorems),
        not_cut=len(found.not_cut),
    )
    for place in found.not_cut[:LISTED]:
        line = (item.line or 1) + (0 if item.line else text.count("\n", 0, place))
        words = " ".join(text[place : place + 200].split()[:6])[:80]
        counts[f"not_cut {item.name}:{line} {words}"] += 1
    return statements(text, found, options.before)


def _prompt(one: Statement, most: int) -> bytes:
    """A statement behind the whole lines among the last `most` bytes before it."""
    before = one.before.encode() if most else b""
    if len(before) > most:
        before = before[-most:].partition(b"\n")[2]
    return before + one.statement.encode()


def _fitted(prompt: bytes, proof: bytes, context: int, coder: Tokenizer, counts: Counter[str]) -> bytes:
    """What of the end of a prompt fits a row with the proof and the end token; empty where nothing does."""
    if len(prompt) + len(proof) < context:  # no text has more tokens than bytes
        return prompt
    room = context - 1 - len(coder.encode_bytes(proof))
    fitted = prompt if room > 0 else b""
    while fitted and (tokens := len(coder.encode_bytes(fitted))) > room:
        start = max(1, len(fitted) * (tokens - room) // tokens)
        while start < len(fitted) and fitted[start] & 0xC0 == 0x80:  # within a character
            start += 1
        fitted = fitted[start:]
    counts["prompts_shortened"] += 0 < len(fitted) < len(prompt)
    return fitted


def _document(split: str, text: bytes, prompt: int) -> Document:
    same = (key(text),)
    return Document(split, NAME, text, prompt, notes=same, unless=same)

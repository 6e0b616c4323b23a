"""Source code: The Stack (rows with contents), any folder of it, or, with nothing given, Python's standard library.

A document is a file. Repositories (files, in a folder) go to a split as a whole, by a hash of their name. Of files with the
same content the first that comes is kept, whatever split it is of.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tangolm.config import suggest
from tangolm.data.held_out import check_fractions, place_of, split_at, token_limits
from tangolm.data.pipeline import Document, Worked, write
from tangolm.data.records import BOM, JSON_LINES, PARQUET, suffix
from tangolm.data.seen import key
from tangolm.data.source import Progress, at_least, check_context, existing, no_progress, option, whole_number
from tangolm.data.stack_hub import hub_parts
from tangolm.data.stack_json import JsonLines
from tangolm.data.stack_rows import Repository, Rows, Wanted, permuted
from tangolm.data.tokenizer import CHOICES, get_tokenizer

NAME = "stack"
HUB = "HuggingFaceCode/stack-v3-train"
LARGEST = 2**24  # bytes of a file that an option may allow; one is held in memory as a whole
VENDORED = ("site-packages", "dist-packages", "node_modules", "vendor", "third_party", "__pycache__", ".*")
LANGUAGES = {
    "Assembly": ".asm .s .S",
    "C": ".c .h",
    "C#": ".cs",
    "C++": ".cc .cpp .cxx .hh .hpp .hxx",
    "Clojure": ".clj .cljs .cljc",
    "CMake": ".cmake",
    "CSS": ".css .scss .less",
    "Cuda": ".cu .cuh",
    "Dart": ".dart",
    "Elixir": ".ex .exs",
    "Erlang": ".erl .hrl",
    "F#": ".fs .fsi .fsx",
    "Fortran": ".f .f90 .f95 .for",
    "Go": ".go",
    "Haskell": ".hs .lhs",
    "HTML": ".html .htm",
    "Java": ".java",
    "JavaScript": ".js .jsx .mjs .cjs",
    "Julia": ".jl",
    "Kotlin": ".kt .kts",
    "Lean": ".lean",
    "Lua": ".lua",
    "Nix": ".nix",
    "OCaml": ".ml .mli",
    "Perl": ".pl .pm",
    "PHP": ".php",
    "PowerShell": ".ps1 .psm1",
    "Python": ".py .pyi",
    "R": ".r .R",
    "Ruby": ".rb",
    "Rust": ".rs",
    "Scala": ".scala",
    "Scheme": ".scm .ss",
    "Shell": ".sh .bash .zsh",
    "SQL": ".sql",
    "Swift": ".swift",
    "TeX": ".tex",
    "TypeScript": ".ts .tsx",
    "Zig": ".zig",
}
BY_SUFFIX = {suffix: language for language, suffixes in LANGUAGES.items() for suffix in suffixes.split()}


@dataclass(frozen=True)
class StackOptions:
    """Options of `prepare stack`."""

    hub: str | None = option(None, f"read a data set of the Hugging Face hub instead of a source, such as {HUB}")
    revision: str = option("main", "branch, tag or commit on the hub; its commit is kept in the manifest")
    languages: tuple[str, ...] = option((), "only these, such as Python; any where empty")
    licenses: tuple[str, ...] = option((), "only these or this kind, such as MIT or permissive; any where empty")
    vendored: bool = option(False, "keep vendored and generated files")
    max_bytes: int = option(1_000_000, "pass over larger files")
    tokens: str | int | None = option(
        None, "end training after exactly so many tokens, such as 1.5B, development and test after their share"
    )
    dev_fraction: float = option(0.05, "part of the repositories (files, in a folder) for development")
    test_fraction: float = option(0.05, "part of the repositories (files, in a folder) for the test")
    seed: int = option(0, "of the order in which the parts are read")
    context: int = option(256, "tokens a row, at least 2")
    tokenizer: str = option("bytes", CHOICES)
    document_masking: bool = option(False, "keep documents in a row from seeing each other")
    on_error: Literal["fail", "skip"] = option("fail", "what a line of JSON that cannot be used does; skip counts it")
    workers: int | None = option(None, "processes that tokenise; one a core where not given")

    def __post_init__(self) -> None:
        check_context(self.context, 2)
        at_least(1, max_bytes=self.max_bytes, workers=self.workers)
        if self.tokens is not None:
            object.__setattr__(self, "tokens", whole_number(self.tokens, "tokens"))
        if self.on_error not in ("fail", "skip"):
            raise ValueError(f"on_error must be one of 'fail', 'skip', got {self.on_error!r}")
        if self.max_bytes > LARGEST:
            raise ValueError(f"max_bytes must be at most {LARGEST:,}, got {self.max_bytes}")
        if not self.revision or self.hub == "":
            raise ValueError(f"hub and revision must not be empty, got {self.hub!r} and {self.revision!r}")
        get_tokenizer(self.tokenizer)
        check_fractions(self.dev_fraction, self.test_fraction)

    def split(self, name: str) -> str:
        """The split of a repository or file, by a hash of its name."""
        return split_at(place_of(name.encode("utf-8", "surrogateescape")), self.dev_fraction, self.test_fraction)


def prepare(
    source: str | Path | None,
    out: str | Path,
    options: StackOptions | None = None,
    progress: Progress = no_progress,
    *,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Prepare source code in `out`.

    Args:
        source: a folder of source code, or parquet or JSON lines of The Stack's schemas (a file, or a folder of them
            without source code); None: the hub where `options.hub` names a data set, else Python's standard library.

    Returns:
        The manifest. `passed_over` counts files by reason; of rows, `fields` says what was missing and what not read, and
        `arguments.revision` is the commit of the hub.

    Raises:
        ValueError: an option, a source or a folder that cannot be used; a split that would be empty.
    """
    options = options or StackOptions()
    if options.hub is not None:
        if source is not None:
            raise ValueError(f"hub {options.hub!r} does not go with a source, here {str(source)!r}; give one of them")
        rows, commit = hub_parts(options.hub, options.revision, options.seed)
        # The commit takes the revision's place, so that what was begun on a branch goes on at its commit.
        options = replace(options, revision=commit)
        return _prepare_rows(rows, None, f"Hugging Face hub: {options.hub}", out, options, progress, overwrite)
    if source is None:
        root, origin = Path(sysconfig.get_path("stdlib")), f"standard library of Python {platform.python_version()}"
        return _prepare_folder(root, origin, out, options, progress, overwrite)
    root = existing(source, NAME)
    if not (records := _records(root)):
        return _prepare_folder(root, "files", out, options, progress, overwrite)
    identity = {name: path.stat().st_size for name, path in sorted(records.items())}
    return _prepare_rows(_local(root, records, options), identity, "rows", out, options, progress, overwrite)


def _local(root: Path, records: dict[str, Path], options: StackOptions) -> Rows:
    names = permuted(records, options.seed)
    kinds = {suffix(path) == PARQUET for path in records.values()}
    if len(kinds) > 1:
        raise ValueError(f"source {str(root)!r} holds parquet and JSON lines; name a folder or file of one of them")
    if kinds == {False}:
        return JsonLines(names, records, options.on_error == "skip")
    try:
        from tangolm.data.stack_parquet import Parts
    except ImportError as error:
        raise ValueError("parquet needs the package pyarrow; pip install 'tangolm[data]'") from error
    return Parts(names, lambda name: records[name].open("rb"))


def _prepare_rows(
    rows: Rows,
    identity: Any,
    origin: str,
    out: str | Path,
    options: StackOptions,
    progress: Progress,
    overwrite: bool,
) -> dict[str, Any]:
    wanted = Wanted(
        frozenset(name.lower() for name in options.languages),
        frozenset(name.lower() for name in options.licenses),
        options.vendored,
        options.max_bytes,
    )
    schema = rows.schema(wanted)
    fields = {"read": schema.fields, "missing": list(schema.missing), "unknown": list(schema.unknown)}
    return write(
        out,
        NAME,
        options,
        items=lambda start: rows.repositories(wanted, start),
        work=partial(work_repository, options=options),
        weigh=lambda repository: sum(len(text) for _, text in repository.files),
        tokenizer=options.tokenizer,
        document_masking=options.document_masking,
        workers=options.workers,
        limits=token_limits(options.tokens, options.dev_fraction, options.test_fraction),  # pyright: ignore[reportArgumentType]
        identity=identity,
        packages=("pyarrow",),
        facts={"origin": origin, "parts": len(rows.names), "fields": fields},
        progress=progress,
        overwrite=overwrite,
    )


def _prepare_folder(
    root: Path, origin: str, out: str | Path, options: StackOptions, progress: Progress, overwrite: bool
) -> dict[str, Any]:
    if options.licenses:
        raise ValueError(
            f"licenses {list(options.licenses)} cannot be told of the files in {str(root)!r}; leave them out"
        )
    suffixes = _suffixes(options.languages)
    files, passed = _files(root, suffixes, options)
    if not files:
        raise ValueError(
            f"source {str(root)!r} has no files of {', '.join(options.languages) or 'a known language'}; "
            f"known: {', '.join(LANGUAGES)}"
        )
    return write(
        out,
        NAME,
        options,
        items=lambda start: iter(files[start:]),
        work=partial(work_file, root=root, options=options),
        weigh=lambda file: file[1],
        tokenizer=options.tokenizer,
        document_masking=options.document_masking,
        workers=options.workers,
        limits=token_limits(options.tokens, options.dev_fraction, options.test_fraction),  # pyright: ignore[reportArgumentType]
        total=sum(size for _, size in files),
        passed_over=passed,
        identity=hashlib.sha256(repr(files).encode("utf-8", "surrogateescape")).hexdigest(),
        facts={"origin": origin},
        progress=progress,
        overwrite=overwrite,
    )


def work_repository(repository: Repository, options: StackOptions) -> Worked:
    """The documents of a row."""
    counts = dict(repository.counts)
    split = options.split(repository.name)
    documents = [_document(split, language, text, counts) for language, text in repository.files]
    return Worked(tuple(document for document in documents if document is not None), counts)


def work_file(file: tuple[str, int], root: Path, options: StackOptions) -> Worked:
    """The document of a file, given by its name below `root` and its size.

    Raises:
        ValueError: it cannot be read.
    """
    name, _ = file
    path = root / name if root.is_dir() else root
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"source {str(path)!r} cannot be read ({error.strerror}); take it away") from error
    counts: dict[str, int] = {}
    if len(text) > options.max_bytes:  # it grew since it was listed
        return Worked((), {"too_large": 1})
    document = _document(options.split(name), BY_SUFFIX[Path(name).suffix], text, counts)
    return Worked(() if document is None else (document,), counts)


def _document(split: str, language: str, text: bytes, counts: dict[str, int]) -> Document | None:
    """A document, without a byte order mark at its start; None for an empty one. What is left out is counted."""
    if text.startswith(BOM):
        text = text.removeprefix(BOM)
        counts["byte_order_marks"] = counts.get("byte_order_marks", 0) + 1
    if not text:
        counts["empty"] = counts.get("empty", 0) + 1
        return None
    digest = (key(text),)
    return Document(split, language, text, notes=digest, unless=digest)


def _records(root: Path) -> dict[str, Path]:
    """The files of rows that `root` is or holds, by name; none where it holds source code."""
    if root.is_file():
        return {root.name: root} if suffix(root) in (*JSON_LINES, PARQUET) else {}
    found = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder) / name
            if path.suffix in BY_SUFFIX:
                return {}
            if suffix(path) in (*JSON_LINES, PARQUET) and not name.startswith("."):
                found[path.relative_to(root).as_posix()] = path
    return found


def _suffixes(languages: tuple[str, ...]) -> frozenset[str]:
    known = {language.lower(): language for language in LANGUAGES}
    for language in languages:
        if language.lower() not in known:
            raise ValueError(f"languages has {language!r}, of which no suffix is known{suggest(language, LANGUAGES)}")
    chosen = [known[language.lower()] for language in languages] or list(LANGUAGES)
    return frozenset(suffix for language in chosen for suffix in LANGUAGES[language].split())


def _files(root: Path, suffixes: frozenset[str], options: StackOptions) -> tuple[list[tuple[str, int]], dict[str, int]]:
    """(name below `root`, size) of the files that are wanted, sorted; links are not followed."""
    passed: dict[str, int] = dict.fromkeys(("links", "too_large", "vendored_folders"), 0)
    if root.is_file():
        if root.suffix not in suffixes:
            return [], passed
        return [(root.name, root.stat().st_size)], passed
    found = []
    for folder, folders, names in os.walk(root):
        inner = Path(folder).relative_to(root).as_posix()
        if not options.vendored:
            own = [name for name in folders if not any(fnmatchcase(name, pattern) for pattern in VENDORED)]
            passed["vendored_folders"] += len(folders) - len(own)
            folders[:] = own
        for name in names:
            path = Path(folder) / name
            if path.suffix not in suffixes or name.startswith("."):
                continue
            if path.is_symlink():
                passed["links"] += 1
            elif (size := path.stat().st_size) > options.max_bytes:
                passed["too_large"] += 1
            else:
                found.append((name if inner == "." else f"{inner}/{name}", size))
    return sorted(found), passed

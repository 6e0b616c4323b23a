"""Rows of The Stack as repositories with the files that are wanted, whatever file they come from.

Version 3 has one row a repository: `repo_path, files[]: content, file_path, language, license_type, detected_licenses,
is_vendor`. Versions 1 and 2 (with contents) have one row a file, with the names that `FIELDS` lists.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tangolm.data.records import RecordError

MOST = 2**26  # bytes of one repository that are kept, so that memory is bounded
REPOSITORY = ("repo_path", "repo_name", "max_stars_repo_name")
FIELDS = {  # what is read of a file, and its name in versions 3, 2 and 1
    "content": ("content",),
    "language": ("language", "lang"),
    "license_type": ("license_type",),
    "licenses": ("detected_licenses", "max_stars_repo_licenses"),
    "vendored": ("is_vendor",),
    "generated": ("is_generated",),
}


@dataclass(frozen=True)
class Wanted:
    """Which files are wanted; names are compared without regard to case.

    Args:
        languages: of these only; any where empty.
        licenses: whose kind of licence or one of whose licences is among these; any where empty.
        vendored: vendored and generated files too.
        max_bytes: at most so many bytes of content.
    """

    languages: frozenset[str]
    licenses: frozenset[str]
    vendored: bool
    max_bytes: int

    def passes_over(self, facts: Mapping[str, Any], size: int | None) -> str | None:
        """Why a file is not wanted, as a name to count it under; None where it is.

        Args:
            facts: its fields by the keys of `FIELDS`, but for the content.
            size: bytes of the content; None where it has none.
        """
        if size is None:
            return "without_content"
        if self.languages and str(facts.get("language")).lower() not in self.languages:
            return "other_language"
        if self.licenses:
            names = [facts.get("license_type"), *(facts.get("licenses") or ())]
            if not any(str(name).lower() in self.licenses for name in names if name):
                return "other_license"
        if not self.vendored and facts.get("vendored"):
            return "vendored"
        if not self.vendored and facts.get("generated"):
            return "generated"
        return "too_large" if size > self.max_bytes else None


@dataclass(frozen=True)
class Repository:
    """A row: the repository's name, (language, content) of each file wanted, and counts of those passed over."""

    name: str
    files: tuple[tuple[str, bytes], ...]
    counts: Mapping[str, int]


@dataclass(frozen=True)
class Schema:
    """Where a part has what is read.

    Args:
        repository: the column with the repository's name.
        nested: whether a row has `files`, rather than being one file.
        fields: the name of each of `FIELDS` that is there.
        missing: those that are not there.
        unknown: fields that are there and not read.
    """

    repository: str
    nested: bool
    fields: dict[str, str]
    missing: tuple[str, ...]
    unknown: tuple[str, ...]


class Rows(Protocol):
    """Parts by name, in the order in which they are read."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def schema(self, wanted: Wanted) -> Schema:
        """The schema of the first part.

        Raises:
            ValueError: it cannot be read, or lacks what is needed; the part and the field are named.
        """
        ...

    def repositories(self, wanted: Wanted, start: int = 0) -> Iterator[Repository]:
        """The rows of all parts from number `start` on.

        Raises:
            ValueError: a part that cannot be read, by name.
        """
        ...


def permuted(names: Iterable[str], seed: int) -> tuple[str, ...]:
    """Names in an order that the seed draws: the parts of version 3 are sorted by the names of their repositories."""
    return tuple(sorted(names, key=lambda name: hashlib.sha256(f"{seed}:{name}".encode("utf-8", "replace")).digest()))


def schema_of(where: str, row: Sequence[str], file: Sequence[str], wanted: Wanted) -> Schema:
    """The schema of rows, given the names of their fields and of their files' (the same where a row is a file).

    Raises:
        RecordError: the name of the repository or the content is not there.
        ValueError: what the options need is not there.
    """
    repository = next((field for field in REPOSITORY if field in row), None)
    if repository is None:
        raise RecordError(f"{where} has none of {', '.join(REPOSITORY)}; it has {', '.join(row)}")
    fields = {
        key: next(name for name in names if name in file)
        for key, names in FIELDS.items()
        if any(name in file for name in names)
    }
    if "content" not in fields:
        raise RecordError(
            f"{where} has no content, only {', '.join(file)}: where rows are mere ids (as The Stack v2 is published), "
            "take a copy with contents"
        )
    for option, keys in (("languages", ["language"]), ("licenses", ["license_type", "licenses"])):
        if getattr(wanted, option) and not any(key in fields for key in keys):
            names = " or ".join(name for key in keys for name in FIELDS[key])
            raise ValueError(f"{where} has no {names}, so files cannot be chosen by it; leave {option} out")
    nested = "files" in row
    read = {repository, "files", *fields.values()}
    unknown = [field for field in row if field not in read]
    unknown += [f"files.{field}" for field in file if nested and field not in read]
    return Schema(repository, nested, fields, tuple(key for key in FIELDS if key not in fields), tuple(unknown))


def gather(
    name: str, files: Iterable[tuple[Mapping[str, Any], int | None, Callable[[], bytes]]], wanted: Wanted
) -> Repository:
    """A repository of its files, each given by its facts, the bytes of its content and a function to get that."""
    counts: Counter[str] = Counter()
    kept, held = [], 0
    for facts, size, content in files:
        why = wanted.passes_over(facts, size)
        if why is None and size is not None and held + size > MOST:
            why = "too_large_repository"
        if why is not None:
            counts[why] += 1
            continue
        held += size or 0
        kept.append((str(facts.get("language") or "unknown"), content()))
    return Repository(name, tuple(kept), counts)

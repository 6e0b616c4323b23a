"""Lean data as JSON lines: what the schemas of proof data sets hold, made into prompts and proofs.

| fields | |
|---|---|
| `srcUpToDecl`, `decl`, `declId`, `proof` | a file up to a declaration, its statement, `MODULE.LINE_COLUMN.HASH`, its proof |
| `fact` | a declaration; `type` says what it is where its text does not |
| `full_proof` | source text with one or more theorems |
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tangolm.data.lean_cut import Cut, cut, unproven
from tangolm.data.records import RecordError, text_of

_FILE = ("file", "filename", "file_path", "module")  # fields that name the file that a record was taken from
_PLACE = re.compile(r"\.\d+_\d+\.\w+\Z")  # what `declId` adds to the name of a module


@dataclass(frozen=True)
class Statement:
    """A statement with what stands before it in its file, and its proof; texts."""

    before: str
    statement: str
    proof: str
    sorry: bool


def statements(text: str, found: Cut, most: int) -> list[Statement]:
    """The theorems that were found in a source text, with more than `most` characters before each where there are."""
    return [
        Statement(
            text[max(0, one.start - most - 1) : one.start],
            text[one.start : one.cut],
            text[one.cut : one.stop],
            one.sorry,
        )
        for one in found.theorems
    ]


def file_of(record: Mapping[str, Any], text: str) -> str:
    """What decides the split of a record: the file it was taken from, or where that is not said its own text."""
    for name in _FILE:
        if isinstance(record.get(name), str) and record[name]:
            return record[name]
    declaration = record.get("declId")
    return _PLACE.sub("", declaration) if isinstance(declaration, str) and declaration else text


def read(record: Mapping[str, Any], where: str) -> tuple[str, Statement | None]:
    """The source text of a record and, where its schema has it apart, its statement and proof.

    Raises:
        RecordError: none of the schemas, or a field that is no text.
    """
    if "proof" in record and "decl" in record:
        statement, proof = (text_of(record, name, where).decode() for name in ("decl", "proof"))
        if not proof.strip() or not statement.strip():
            raise RecordError(f"source {where}: its 'decl' or 'proof' is empty")
        before = text_of(record, "srcUpToDecl", where).decode() if "srcUpToDecl" in record else ""
        if not statement[-1].isspace() and not proof[0].isspace():
            statement += " "
        return statement + proof, Statement(before, statement, proof, unproven(statement + proof))
    for name in ("full_proof", "fact"):
        if name in record:
            text = text_of(record, name, where).decode()
            kind = record.get("type")
            if kind in ("theorem", "lemma") and not (found := cut(text)).theorems and not found.not_cut:
                text = f"{kind} {text.lstrip()}"
            return text, None
    raise RecordError(
        f"source {where} has none of the fields 'decl' with 'proof', 'full_proof' and 'fact'; "
        f"it has {', '.join(map(repr, list(record)[:10]))}"
    )

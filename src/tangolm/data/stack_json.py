"""Rows of The Stack from JSON lines, packed or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tangolm.data.records import RecordError, lines, parse, text_of
from tangolm.data.stack_rows import FIELDS, REPOSITORY, Repository, Schema, Wanted, gather, schema_of


@dataclass(frozen=True)
class JsonLines:
    """Files of JSON lines by name, in the order in which they are read.

    Args:
        names: of the files.
        paths: where they lie.
        skip: whether a line that cannot be used is passed over and counted as "bad_records", or ends the preparation.
    """

    names: tuple[str, ...]
    paths: Mapping[str, Path]
    skip: bool

    def schema(self, wanted: Wanted) -> Schema:
        """The schema of the first row that has a file.

        Raises:
            ValueError: there is none, or it lacks what is needed; file and line are named. Where lines are passed over, the
                first that has what is needed counts.
        """
        fault = None
        for where, line in self._lines():
            try:
                record = parse(line, where)
                files = _files(record, where)
            except RecordError:
                continue  # reading comes to it
            if not files:
                continue
            try:
                return schema_of(where, list(record), list(files[0]), wanted)
            except RecordError as error:
                if not self.skip:
                    raise
                fault = fault or error
        raise fault or ValueError(
            f"{', '.join(self.names[:3])}: no line has a file; give lines of the schema of The Stack"
        )

    def repositories(self, wanted: Wanted, start: int = 0) -> Iterator[Repository]:
        """The rows of all files from number `start` on.

        Raises:
            ValueError: a file that cannot be read, or a line that cannot be used where it is not passed over, by name.
        """
        for where, line in islice(self._lines(), start, None):
            try:
                yield _repository(parse(line, where), where, wanted)
            except RecordError as error:
                if not self.skip:
                    raise ValueError(f"{error}; mend it, or pass over such lines with on_error='skip'") from error
                yield Repository("", (), {"bad_records": 1})

    def _lines(self) -> Iterator[tuple[str, bytes]]:
        for name in self.names:
            for number, line in lines(self.paths[name]):
                yield f"{str(self.paths[name])!r} line {number}", line


def _files(record: dict[str, Any], where: str) -> list[dict[str, Any]]:
    files = record.get("files") or [] if "files" in record else [record]
    if not isinstance(files, list) or not all(isinstance(file, dict) for file in files):
        raise RecordError(f"source {where}: its files are no list of objects")
    return files


def _repository(record: dict[str, Any], where: str, wanted: Wanted) -> Repository:
    name = next((record[field] for field in REPOSITORY if isinstance(record.get(field), str)), None)
    if name is None:
        raise RecordError(f"source {where} has none of {', '.join(REPOSITORY)}")
    files = []
    for file in _files(record, where):
        facts = {key: next((file[n] for n in names if n in file), None) for key, names in FIELDS.items()}
        if facts["licenses"] is not None and not isinstance(facts["licenses"], list):
            raise RecordError(
                f"source {where}: the licences of a file are no list but {type(facts['licenses']).__name__}"
            )
        content = None if file.get("content", 0) is None else text_of(file, "content", where)
        files.append((facts, None if content is None else len(content), lambda content=content: content))
    return gather(name, files, wanted)

"""The contract that all data sets share: options, progress, and what a preparation takes and returns."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

LONGEST_CONTEXT = 2**20  # tokens; rows are kept whole in memory while they are written
Progress = Callable[[int, int, str], None]  # done, total, what is being done


class Prepare(Protocol):
    """Reads `source`, writes shards and manifest into `out`, and returns the manifest.

    Raises ValueError for a source or a folder that cannot be used. A fault found before reading begins leaves `out` as it was;
    one found later leaves it half-written, which the next preparation starts over.
    """

    def __call__(
        self,
        source: str | Path | None,
        out: str | Path,
        options: Any,
        progress: Progress = ...,
        *,
        overwrite: bool = ...,
    ) -> dict[str, Any]: ...


@dataclass(frozen=True)
class DataSet:
    """A data set: one line for people, its frozen dataclass of options, and its preparation."""

    summary: str
    options: type
    prepare: Prepare
    needs_source: bool


def option(default: Any, text: str) -> Any:
    """A field of an options dataclass with its line of help."""
    return dataclasses.field(default=default, metadata={"help": text})


def no_progress(done: int, total: int, text: str) -> None:
    """The progress of who does not ask for one."""


def at_least(low: int, **options: int | None) -> None:
    """Refuse options below `low`; None is let through.

    Raises:
        ValueError: names the option, its value and the bound.
    """
    for name, value in options.items():
        if value is not None and value < low:
            raise ValueError(f"{name} must be at least {low}, got {value}")


def check_context(context: int, least: int) -> None:
    """Refuse a context below `least` or above `LONGEST_CONTEXT`.

    Raises:
        ValueError: names the value and the bound.
    """
    if context > LONGEST_CONTEXT:
        raise ValueError(f"context must be at most {LONGEST_CONTEXT:,}, got {context}")
    at_least(least, context=context)


def whole_number(value: int | str, name: str) -> int:
    """`value`, which may be written with a suffix: 1.5B, 300M, 64k (powers of 1,000).

    Raises:
        ValueError: no whole number of 1 or more; the option is named.
    """
    match = re.fullmatch(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([kmbgt]?)\s*", str(value), re.IGNORECASE)
    if match:
        scale = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}[match[2].lower()]
        number = Fraction(match[1].replace(",", "").replace("_", "")) * scale
        if number.denominator == 1 and number >= 1:
            return int(number)
    raise ValueError(f"{name} must be a whole number of 1 or more such as 2000000, 300M or 1.5B, got {value!r}")


def new_manifest(
    dataset: str, options: Any, tokenizer: Any, document_masking: bool, packages: Iterable[str] = (), **further: Any
) -> dict[str, Any]:
    """The fields that every manifest has, but for its splits."""
    arguments = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    # How many processes did the work and where the data lay changes nothing in it; two preparations then compare equal.
    arguments.pop("workers", None)
    return {
        "format": 1,
        "dataset": dataset,
        "context": options.context,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "end_token": tokenizer.end_token,
        **({"tokenizer_sha256": tokenizer.sha256} if tokenizer.sha256 else {}),
        "document_masking": document_masking,
        "arguments": {name: list(value) if isinstance(value, tuple) else value for name, value in arguments.items()},
        "versions": {"python": platform.python_version(), **_versions(["tangolm", "numpy", *packages])},
        **further,
    }


def existing(source: str | Path | None, dataset: str) -> Path:
    """`source` as a path that is there.

    Raises:
        ValueError: none was given, or there is nothing at it.
    """
    if source is None:
        raise ValueError(f"source is missing: {dataset} is prepared from a file or folder of yours; give --source PATH")
    path = Path(source)
    if not path.exists():
        raise ValueError(f"source {str(path)!r} does not exist; give the path of a file or folder")
    return path


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _versions(packages: Iterable[str]) -> Mapping[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found

"""The folder of prepared data: what its manifest says, and when a folder may be written.

A preparation marks its folder with `preparing.json`, writes shards, then `manifest.json` in one step, and takes the mark
away. A folder with a manifest is finished; one with a mark is half-written: its preparation goes on where it kept a
journal, and is started over where not; anything else that is not empty is somebody else's and is left alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tangolm.config import ConfigError, from_dict
from tangolm.data.tokenizer import get_tokenizer

FORMAT = 1
MANIFEST, MARK, JOURNAL = "manifest.json", "preparing.json", "journal.npz"
SPLITS = ("train", "dev", "test")
_OURS = re.compile(
    r"(train|dev|test)-\d{5}\.(tokens|supervised)\.npy|preparing\.json|manifest\.json|journal\.npz|\.tmp-.*"
)


@dataclass(frozen=True)
class Shard:
    """`name`.tokens.npy and, where not all of its tokens are supervised, `name`.supervised.npy."""

    name: str
    rows: int
    sha256: dict[str, str]


@dataclass(frozen=True)
class Source:
    """A part of a split, such as a module of mathematics; `rows` is its range where its rows stand together."""

    name: str
    documents: int
    rows: tuple[int, int] | None = None
    digest: str | None = None


@dataclass(frozen=True)
class SplitEntry:
    """Counts of a split: `bytes` are those of its text, `supervised_tokens` those that a loss over it can count.

    `bytes_per_token` is of the supervised text, end tokens counted and a row's first token too: a loss of L nats a token
    is L / ln 2 / bytes_per_token bits a byte.
    """

    rows: int
    tokens: int
    supervised_tokens: int
    documents: int
    bytes: int
    shards: tuple[Shard, ...]
    sources: tuple[Source, ...]
    bytes_per_token: float | None = None


@dataclass(frozen=True)
class Required:
    """The fields of a manifest that reading relies on; a data set may add others.

    `tokenizer_sha256` is of the file that a tokenizer is read from.
    """

    format: int
    dataset: str
    context: int
    tokenizer: str
    vocab_size: int
    end_token: int
    document_masking: bool
    splits: dict[str, SplitEntry]
    tokenizer_sha256: str | None = None


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when it is whole and synced, and leaves nothing when it is not."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write JSON in one step."""
    with replacing(path) as file:
        file.write(json.dumps(value, indent=1, allow_nan=False).encode() + b"\n")


def resumes(out: Path, plan: Mapping[str, Any], overwrite: bool) -> bool:
    """Whether `out` holds an interrupted preparation of the same plan with a journal to go on from.

    Args:
        plan: JSON data; what decides the shards.
        overwrite: give up one of another plan.

    Raises:
        ValueError: an interrupted preparation of another plan, without `overwrite`; what differs is named.
    """
    if not ((out / MARK).is_file() and (out / JOURNAL).is_file()) or (out / MANIFEST).exists():
        return False
    try:
        begun = json.loads((out / MARK).read_bytes())["plan"]
        names = sorted(name for name in {*begun, *plan} if begun.get(name) != plan.get(name))
    except (ValueError, KeyError, TypeError, AttributeError):
        return False  # the mark of another version: started over
    if not names:
        return True
    if overwrite:
        return False
    old, new = (json.dumps(values.get(names[0]))[:100] for values in (begun, plan))
    raise ValueError(
        f"out {str(out)!r} holds an interrupted preparation whose {names[0]} was {old} and is now {new}; "
        "give what it began with to go on, or overwrite it"
    )


def claim(out: Path, dataset: str, overwrite: bool = False, plan: Mapping[str, Any] | None = None) -> Path:
    """Make `out` ready for a preparation: new, empty or half-written by an earlier one; finished only with `overwrite`.

    Args:
        plan: of a preparation that keeps a journal, for `resumes`.

    Raises:
        ValueError: a finished preparation without `overwrite`, a file, or a folder that holds anything else.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"out {str(out)!r} is a file; name a folder")
    found = sorted(path.name for path in out.iterdir()) if out.exists() else []
    ours = MARK in found or MANIFEST in found
    foreign = [name for name in found if not (ours and _OURS.fullmatch(name))]
    if foreign:
        raise ValueError(
            f"out {str(out)!r} holds {foreign[0]!r}, which is no prepared data; name a new or empty folder"
        )
    if MANIFEST in found and not overwrite:
        raise ValueError(f"out {str(out)!r} already holds prepared data; name another folder, or overwrite it")
    out.mkdir(parents=True, exist_ok=True)
    (out / JOURNAL).unlink(missing_ok=True)  # before the mark, so that no journal is ever taken for one of this plan
    write_json(out / MARK, {"format": FORMAT, "dataset": dataset, "plan": plan})
    (out / MANIFEST).unlink(missing_ok=True)  # before the shards, so that no manifest ever names a missing one
    for name in found:
        if name != MARK:
            (out / name).unlink(missing_ok=True)
    return out


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Finish a preparation: the manifest, checked and written in one step, then the mark removed."""
    check_manifest(manifest, str(folder / MANIFEST))
    write_json(folder / MANIFEST, manifest)
    for name in (JOURNAL, MARK):
        (folder / name).unlink(missing_ok=True)


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a prepared folder, its types checked.

    Raises:
        ValueError: the folder is missing, empty, half-written, somebody else's, or its manifest is damaged.
    """
    folder = Path(folder)
    prepare = "prepare it with: tangolm prepare DATASET --out FOLDER"
    if not folder.exists():
        raise ValueError(f"data {str(folder)!r} does not exist; {prepare}")
    if not folder.is_dir():
        raise ValueError(f"data {str(folder)!r} is a file; name the folder that tangolm prepare wrote")
    path = folder / MANIFEST
    if not path.is_file():
        found = sorted(item.name for item in folder.iterdir())
        if not found:
            raise ValueError(f"data {str(folder)!r} is empty; {prepare}")
        if all(_OURS.fullmatch(name) for name in found):
            raise ValueError(
                f"data {str(folder)!r} is half-written (it has no {MANIFEST}); run its tangolm prepare again"
            )
        raise ValueError(f"data {str(folder)!r} has no {MANIFEST}: it is no prepared data; {prepare}")
    try:
        manifest = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"data {str(path)!r} is damaged: it is no JSON ({error}); prepare the folder again") from error
    check_manifest(manifest, str(path))
    return manifest


def check_manifest(manifest: Any, where: str) -> Required:
    """The required part of a manifest, its types and counts checked.

    Raises:
        ValueError: a key is missing, of a wrong type, or contradicts another; the format or tokenizer is not known.
    """
    names = Required.__dataclass_fields__
    try:
        if not isinstance(manifest, Mapping):
            raise ConfigError(f"it must be a mapping, got {type(manifest).__name__}")
        if manifest.get("format") != FORMAT:
            raise ConfigError(f"format must be {FORMAT}, got {manifest.get('format')!r}")
        required = from_dict(Required, {name: manifest[name] for name in names if name in manifest})
        _check_counts(required)
    except ConfigError as error:
        raise ValueError(
            f"data {where!r} is no manifest that can be read: {error}; prepare the folder again"
        ) from error
    return required


def _check_counts(manifest: Required) -> None:
    tokenizer = get_tokenizer_or_refuse(manifest.tokenizer)
    for name, known in (("vocab_size", tokenizer.vocab_size), ("end_token", tokenizer.end_token)):
        if getattr(manifest, name) != known:
            raise ConfigError(f"{name} must be {known} for the tokenizer {manifest.tokenizer!r}")
    if manifest.tokenizer_sha256 not in (None, tokenizer.sha256):
        raise ConfigError(
            f"tokenizer {manifest.tokenizer!r} is not the one that the data was prepared with: the sha256 of its file is "
            f"{tokenizer.sha256}, not {manifest.tokenizer_sha256}"
        )
    if manifest.context < 1:
        raise ConfigError(f"context must be at least 1, got {manifest.context}")
    for split, entry in manifest.splits.items():
        if split not in SPLITS:
            raise ConfigError(f"splits has {split!r}; known: {', '.join(SPLITS)}")
        if (
            entry.rows != sum(shard.rows for shard in entry.shards)
            or min((s.rows for s in entry.shards), default=1) < 1
        ):
            raise ConfigError(f"splits.{split}.rows is {entry.rows}, which is not the sum over its shards")
        for shard in entry.shards:
            # The name is joined to the folder's path: it must not lead out of it.
            if not re.fullmatch(rf"{split}-\d{{5}}", shard.name):
                raise ConfigError(f"splits.{split} names the shard {shard.name!r}")
            if "tokens.npy" not in shard.sha256 or not set(shard.sha256) <= {"tokens.npy", "supervised.npy"}:
                raise ConfigError(f"splits.{split} has no checksums for the shard {shard.name!r}")
        for source in entry.sources:
            if source.rows is not None and not 0 <= source.rows[0] <= source.rows[1] <= entry.rows:
                raise ConfigError(f"splits.{split} gives {source.name!r} the rows {source.rows} of {entry.rows}")


def get_tokenizer_or_refuse(name: str) -> Any:
    try:
        return get_tokenizer(name)
    except ValueError as error:
        raise ConfigError(str(error)) from error

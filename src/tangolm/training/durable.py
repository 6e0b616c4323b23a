"""Files that are whole or absent: written under a temporary name, flushed to the disk, then renamed. Seals and hashes that
show a changed byte. And one writer a folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step; a crash leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, data: Any) -> None:
    """`write_text` of JSON data; numbers that are not finite are refused."""
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def sealed(body: Mapping[str, Any]) -> str:
    """JSON in one spelling, with a hash of itself: any changed byte, even white space, shows."""
    plain = json.dumps(body, sort_keys=True, indent=1, allow_nan=False)
    return json.dumps({**body, "seal": hashlib.sha256(plain.encode()).hexdigest()}, sort_keys=True, indent=1) + "\n"


def seal_holds(text: str) -> bool:
    """Whether `text` is what `sealed` wrote, to the byte."""
    try:
        body = json.loads(text)
        body.pop("seal")
        return sealed(body) == text
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return False


def file_sha256(path: Path) -> str:
    """The sha256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_file(path: Path) -> None:
    """Wait until the file's contents are on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the folder's entries are on the disk (where the system allows to open a folder)."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from writing the folder; a killed process lets go by itself.

    Raises:
        ValueError: another process is at it.
    """
    try:
        import fcntl
    except ImportError:  # a system without it goes unguarded
        yield
        return
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"{folder} is being written by another process; wait for it, or name another --out"
            ) from None
        yield

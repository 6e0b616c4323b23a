"""Keys seen so far, on disk: however many there are, memory stays bounded."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable
from pathlib import Path

FILE = ".tmp-seen.sqlite"


def key(data: bytes) -> int:
    """A 64-bit key of `data`: two of 100 million different texts share one with a probability of 0.0003."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)


class Seen:
    """The keys of a preparation in `folder`, each with the number of the step that noted it."""

    def __init__(self, folder: Path, step: int) -> None:
        """What was noted at `step` or later is forgotten: a preparation that goes on there notes it again."""
        self._path = folder / FILE
        self._database = sqlite3.connect(self._path)
        self._database.execute("CREATE TABLE IF NOT EXISTS seen (key INTEGER PRIMARY KEY, step INTEGER NOT NULL)")
        self._database.execute("DELETE FROM seen WHERE step >= ?", (step,))
        self._database.commit()

    def note(self, keys: Iterable[int], step: int) -> None:
        """Note keys; one that is known keeps its step."""
        self._database.executemany("INSERT OR IGNORE INTO seen VALUES (?, ?)", [(item, step) for item in keys])

    def any(self, keys: Iterable[int]) -> bool:
        """Whether one of the keys was noted."""
        find = "SELECT 1 FROM seen WHERE key = ?"
        return any(self._database.execute(find, (item,)).fetchone() is not None for item in keys)

    def save(self) -> None:
        """Bring what was noted to the disk."""
        self._database.commit()

    def close(self) -> None:
        self._database.close()

    def remove(self) -> None:
        """Close and delete it."""
        self.close()
        self._path.unlink(missing_ok=True)

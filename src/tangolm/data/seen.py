"""Keys seen so far, on disk: however many there are, memory stays bounded."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path

FILE = ".tmp-seen.sqlite"
_TOGETHER = 500  # keys of a query; older versions of sqlite take 999
_CACHE = 2**25  # bytes of the database that are held in memory


def key(data: bytes) -> int:
    """A 64-bit key of `data`: two of 100 million different texts share one with a probability of 0.0003."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)


class Seen:
    """The keys of a preparation in `folder`, each with the number of the step that noted it."""

    def __init__(self, folder: Path, step: int) -> None:
        """What was noted at `step` or later is forgotten: a preparation that goes on there notes it again."""
        self._path = folder / FILE
        self._database = sqlite3.connect(self._path)
        self._database.execute(f"PRAGMA cache_size = -{_CACHE // 1024}")
        self._database.execute("CREATE TABLE IF NOT EXISTS seen (key INTEGER PRIMARY KEY, step INTEGER NOT NULL)")
        self._database.execute("DELETE FROM seen WHERE step >= ?", (step,))
        self._database.commit()

    def note(self, keys: Mapping[int, int]) -> None:
        """Note keys, each with its step; one that is known keeps its own."""
        # In the order of the keys, so that neighbours come to the same page.
        self._database.executemany("INSERT OR IGNORE INTO seen VALUES (?, ?)", sorted(keys.items()))

    def known(self, keys: Iterable[int]) -> set[int]:
        """Those of the keys that were noted."""
        asked, found = sorted(set(keys)), set()
        for first in range(0, len(asked), _TOGETHER):
            some = asked[first : first + _TOGETHER]
            find = f"SELECT key FROM seen WHERE key IN ({','.join('?' * len(some))})"
            found.update(key for (key,) in self._database.execute(find, some))
        return found

    def save(self) -> None:
        """Bring what was noted to the disk."""
        self._database.commit()

    def close(self) -> None:
        self._database.close()

    def remove(self) -> None:
        """Close and delete it."""
        self.close()
        self._path.unlink(missing_ok=True)

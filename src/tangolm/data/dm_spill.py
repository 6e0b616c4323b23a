"""Questions by split and source, kept in temporary files between drawing and packing, so that memory stays bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

BLOCK = 2**16  # bytes read ahead of each source


class Spill:
    """Question and answer lines in `folder`, a file a split and source; `remove` deletes them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.counts: Counter[tuple[str, str]] = Counter()

    @property
    def total(self) -> int:
        return self.counts.total()

    def append(self, split: str, source: str, pairs: Iterable[tuple[str, str]]) -> None:
        """Add questions and their answers, neither of which may hold a newline."""
        lines = [f"{question}\n{answer}\n" for question, answer in pairs]
        # Opened for each call: hundreds of files held open exceed the limit of some systems.
        with self._path(split, source).open("a", encoding="utf-8", newline="\n") as file:
            file.writelines(lines)
        self.counts[split, source] += len(lines)

    def read(self, split: str, source: str) -> Iterator[tuple[str, str]]:
        """The questions and answers of a source in the order they were added."""
        offset, lines = 0, []
        while self.counts[split, source]:
            with self._path(split, source).open("rb") as file:
                file.seek(offset)
                block = file.readlines(BLOCK)
                offset = file.tell()
            if not block:
                return
            lines += [line.decode("utf-8")[:-1] for line in block]
            even = len(lines) - len(lines) % 2
            yield from zip(lines[0:even:2], lines[1:even:2], strict=True)
            lines = lines[even:]

    def remove(self) -> None:
        for split, source in self.counts:
            self._path(split, source).unlink(missing_ok=True)

    def _path(self, split: str, source: str) -> Path:
        return self._folder / f".tmp-{split}-{source}.txt"

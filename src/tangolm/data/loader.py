"""Rows to batches. Sample k, counted over all epochs, is row `permutation(data_seed, epoch)[k % rows]` of its split.

A loader's whole state is the number of the next sample: no buffer, no generator to save, the same for every architecture.
In a mixture the number of the batch says which part it is of, and that part is read as it would be alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from tangolm.data.mixture import MixedSplit
from tangolm.data.shards import Split

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """B rows of T tokens as int64 on the host.

    `labels` are aligned with `input_ids`, -100 where a token is no target. `document_ids` number the documents of a row
    from 0, an end token being the last of its own; all are 0 in a row whose documents see each other, and None stands for a
    batch of such rows alone. `sample_ids` are the rows of the split.
    """

    input_ids: Int[Tensor, "B T"]
    labels: Int[Tensor, "B T"]
    document_ids: Int[Tensor, "B T"] | None
    sample_ids: Int[Tensor, "B"]


class Loader:
    """Shuffled batches of a split, epoch after epoch without a gap between them."""

    def __init__(self, split: Split | MixedSplit, batch_size: int, data_seed: int) -> None:
        """
        Args:
            split: of prepared data or of a mixture.
            batch_size: samples of a batch over all processes: sample k is of batch `k // batch_size`.
            data_seed: of the order of the rows, and of the parts where their turns are drawn.

        Raises:
            ValueError: an empty split, a batch size below 1, a data seed outside 0 to 2**32 - 1.
        """
        check_split(split, batch_size)
        if not 0 <= data_seed < 2**32:
            raise ValueError(f"data_seed must be 0 to {2**32 - 1}, got {data_seed}")
        self.split, self.batch_size, self.data_seed = split, batch_size, data_seed
        parts = list(split.parts.values()) if isinstance(split, MixedSplit) else [split]
        self._orders = [_Order(part.rows, data_seed) for part in parts]

    def row_of(self, sample: int) -> int:
        """The row that sample `sample` reads: a pure function of seed, batch size, the split's sizes and `sample`."""
        if not isinstance(self.split, MixedSplit):
            return self._orders[0].row(sample)
        batch, place = divmod(sample, self.batch_size)
        part, turn = self.split.schedule.turn(batch, self.data_seed)
        return self.split.first[part] + self._orders[part].row(turn * self.batch_size + place)

    def batch(self, start: int, count: int | None = None) -> Batch:
        """Samples `start` to `start + count - 1`; `count` is the batch size unless given.

        Raises:
            ValueError: `start` below 0 or `count` below 1.
        """
        count = self.batch_size if count is None else count
        if start < 0 or count < 1:
            raise ValueError(f"batch needs start >= 0 and count >= 1, got start {start} and count {count}")
        return read_rows(self.split, [self.row_of(sample) for sample in range(start, start + count)])


class _Order:
    """The order of the rows of a split or of a part, epoch after epoch."""

    def __init__(self, rows: int, data_seed: int) -> None:
        self._rows, self._data_seed = rows, data_seed
        self._epochs: dict[int, np.ndarray] = {}

    def row(self, position: int) -> int:
        """The row at a position, counted over all epochs."""
        epoch, place = divmod(position, self._rows)
        if epoch not in self._epochs:
            if len(self._epochs) > 1:  # a batch spans two epochs at most, unless the split is smaller than the batch
                self._epochs.clear()
            # numpy's policy freezes RandomState's stream, unlike that of its newer generators.
            self._epochs[epoch] = np.random.RandomState([self._data_seed, epoch]).permutation(self._rows)
        return int(self._epochs[epoch][place])


def evaluation_batches(split: Split | MixedSplit, batch_size: int, limit_rows: int | None = None) -> Iterator[Batch]:
    """The rows of a split in order, each once; the last batch may be shorter.

    Args:
        limit_rows: as for `evaluation_rows`.

    Raises:
        ValueError: an empty split, a batch size or a limit below 1.
    """
    check_split(split, batch_size)
    return batches(split, batch_size, evaluation_rows(split, limit_rows))


def evaluation_rows(split: Split | MixedSplit, limit_rows: int | None = None) -> list[int]:
    """The rows that an evaluation reads: all of them, or so many evenly spaced (the first may all be of one source).

    Raises:
        ValueError: a limit below 1.
    """
    if limit_rows is not None and limit_rows < 1:
        raise ValueError(f"limit_rows must be at least 1, got {limit_rows}")
    count = split.rows if limit_rows is None else min(limit_rows, split.rows)
    return [index * split.rows // count for index in range(count)]


def batches(split: Split | MixedSplit, batch_size: int, rows: list[int]) -> Iterator[Batch]:
    """These rows of a split in the order given; the last batch may be shorter."""
    for start in range(0, len(rows), batch_size):
        yield read_rows(split, rows[start : start + batch_size])


def check_split(split: Split | MixedSplit, batch_size: int) -> None:
    """
    Raises:
        ValueError: an empty split, or a batch size below 1.
    """
    for part in split.parts.values() if isinstance(split, MixedSplit) else [split]:
        if part.rows < 1:
            raise ValueError(f"split {part.name!r} of {str(part.folder)!r} has no rows; prepare it with more data")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")


def read_rows(split: Split | MixedSplit, rows: list[int]) -> Batch:
    """These rows of a split as a batch."""
    import torch  # here, so that the processes of a preparation do not hold it

    pairs = [split.row(row) for row in rows]
    input_ids = torch.from_numpy(np.stack([tokens for tokens, _ in pairs]))
    supervised = torch.from_numpy(np.stack([marks for _, marks in pairs]))
    document_ids = None
    masked = [split.masked(row) for row in rows]
    if any(masked):
        ends = ((input_ids == split.end_token) & torch.tensor(masked)[:, None]).long()
        document_ids = ends.cumsum(dim=1) - ends
    return Batch(input_ids, input_ids.masked_fill(~supervised, -100), document_ids, torch.tensor(rows))

"""Which part of a mixture a batch is of: a pure function of the batch's number, so that a schedule has no state to save.

Batches are counted over the whole run and over all processes; each is of one part. "alternate" takes the parts in turn.
"weights" takes them in blocks of `BLOCK` batches, each with the same number of batches of a part, in an order that the data
seed draws anew for every block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from tangolm.config import suggest

BLOCK = 1000  # batches; the shares of the parts are exact to one in so many
KINDS = ("alternate", "weights")


@dataclass(frozen=True)
class Schedule:
    """The order in which the parts of a mixture give a batch.

    Args:
        kind: "alternate" or "weights".
        weights: of the parts, in their order; only their ratios count. All alike where the parts alternate.

    Raises:
        ValueError: an unknown kind; fewer than two parts; a weight that is not above 0, or too small beside the others.
    """

    kind: str
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"schedule {self.kind!r} is not known{suggest(self.kind, KINDS)}")
        if len(self.weights) < 2:
            raise ValueError(f"a mixture has at least 2 parts, got {len(self.weights)}; name another prepared folder")
        for weight in self.weights:
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"weights must be above 0 and finite, got {weight}; leave that part out")
        if self.kind == "alternate" and len(set(self.weights)) > 1:
            raise ValueError(f"weights {list(self.weights)} do not go with schedule='alternate'; take 'weights'")
        if min(self.quotas) == 0:
            raise ValueError(
                f"weights {list(self.weights)}: the smallest is below 1/{BLOCK} of their sum; leave that part out"
            )

    @cached_property
    def quotas(self) -> tuple[int, ...]:
        """Batches of each part in a block; they add up to its length."""
        if self.kind == "alternate":
            return (1,) * len(self.weights)
        exact = [BLOCK * weight / math.fsum(self.weights) for weight in self.weights]
        quotas = [math.floor(share) for share in exact]
        missing = sorted(range(len(exact)), key=lambda part: (quotas[part] - exact[part], part))
        for part in missing[: BLOCK - sum(quotas)]:
            quotas[part] += 1
        return tuple(quotas)

    def turn(self, batch: int, data_seed: int) -> tuple[int, int]:
        """The part that batch `batch` is of, and how many of the earlier batches were of that part."""
        block, place = divmod(batch, sum(self.quotas))
        if self.kind == "alternate":
            return place, block
        order = _order(self.quotas, data_seed, block)
        part = int(order[place])
        return part, block * self.quotas[part] + int(np.count_nonzero(order[:place] == part))


@lru_cache(maxsize=4)
def _order(quotas: tuple[int, ...], data_seed: int, block: int) -> np.ndarray:
    # numpy's policy freezes RandomState's stream. The third number sets it apart from the orders of the rows.
    random = np.random.RandomState([data_seed, block, 1])
    return random.permutation(np.repeat(np.arange(len(quotas)), quotas))

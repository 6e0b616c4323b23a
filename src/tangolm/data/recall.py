"""Recall over a distance: what a model without far sources cannot know.

A row begins with bindings, each a single token that stands for a key and its value; filler follows, and a query now and then: a
key and behind it its value, which is the only supervised token. An answer needs the bindings at the row's beginning, up to
`context` tokens back. Queries stand so far apart that a window is no help, even one that several applications widen. Bytes:

    binding 64 + 8 k + v    query "!#$%"[k]    value "0" + v    filler a to z    the end token last         k < keys, v < 8

Guessing costs ln 8 = 2.08 nats an answer. (Single-token bindings, because pairs of a key and a value also have to be found as
such, which small models need far longer to learn; compare MQAR in Arora et al. 2023, arXiv:2312.04927.)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tangolm.data.shards import ShardWriter, claim, write_manifest
from tangolm.data.source import Progress, at_least, check_context, new_manifest, no_progress, option
from tangolm.data.tokenizer import ByteTokenizer

NAME = "recall"
KEYS, VALUES = b"!#$%", b"01234567"
FILLER = b"abcdefghijklmnopqrstuvwxyz"
FIRST_BINDING = 64


@dataclass(frozen=True)
class RecallOptions:
    """Options of `prepare recall`."""

    context: int = option(1024, "tokens a row")
    keys: int = option(1, f"keys a row, at most {len(KEYS)}")
    copies: int = option(32, "times that each binding stands at the beginning; more are sooner found")
    spacing: int = option(80, "tokens from one query to the next, at least 4")
    train_rows: int = option(2048, "rows to train on")
    dev_rows: int = option(32, "rows for development")
    test_rows: int = option(64, "rows for the test")
    seed: int = option(0, "of the rows")

    def __post_init__(self) -> None:
        at_least(1, keys=self.keys, copies=self.copies)
        at_least(1, train_rows=self.train_rows, dev_rows=self.dev_rows, test_rows=self.test_rows)
        at_least(4, spacing=self.spacing)
        if self.keys > len(KEYS):
            raise ValueError(f"keys must be at most {len(KEYS)}, got {self.keys}")
        if self.queries < 1:
            least = self.keys * self.copies + 2 * self.spacing + 1
            raise ValueError(
                f"context must be at least {least} for these bindings and this spacing, got {self.context}"
            )
        check_context(self.context, 1)
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be 0 to {2**32 - 1}, got {self.seed}")

    @property
    def queries(self) -> int:
        """Queries a row: one in each stretch of `spacing` tokens but the first behind the bindings."""
        return (self.context - 1 - self.keys * self.copies) // self.spacing - 1


def prepare(
    source: str | Path | None,
    out: str | Path,
    options: RecallOptions | None = None,
    progress: Progress = no_progress,
    *,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Generate rows of recall in `out`; there is no source to read.

    Raises:
        ValueError: a source, an option or a folder that cannot be used.
    """
    if source is not None:
        raise ValueError(f"source {str(source)!r}: {NAME} is generated and reads none; leave --source out")
    options = options or RecallOptions()
    out = claim(Path(out), NAME, overwrite)
    tokenizer = ByteTokenizer()
    manifest = new_manifest(NAME, options, tokenizer, False, generated=True)
    manifest["splits"] = {}
    for number, (split, rows) in enumerate(
        (("train", options.train_rows), ("dev", options.dev_rows), ("test", options.test_rows))
    ):
        random = np.random.RandomState([options.seed, number])  # numpy's policy freezes its stream
        writer = ShardWriter(out, split, options.context, tokenizer.vocab_size)
        for done in range(rows):
            writer.add(*_row(random, options, tokenizer.end_token))
            if done % 256 == 255 or done == rows - 1:
                progress(done + 1, rows, f"writing {split}")
        manifest["splits"][split] = {
            "rows": rows,
            "tokens": rows * options.context,
            "supervised_tokens": rows * options.queries,
            "documents": rows,
            "bytes": rows * (options.context - 1),
            "shards": writer.close(),
            "sources": [{"name": NAME, "documents": rows, "rows": [0, rows]}],
        }
    write_manifest(out, manifest)
    return manifest


def _row(random: np.random.RandomState, options: RecallOptions, end_token: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and supervision of a row, [context] each."""
    keys, values, filler = (np.frombuffer(text, np.uint8) for text in (KEYS, VALUES, FILLER))
    tokens = random.choice(filler, options.context).astype(np.int64)
    supervised = np.zeros(options.context, bool)
    value = random.randint(len(values), size=options.keys)
    bound = random.permutation(np.repeat(np.arange(options.keys), options.copies))
    tokens[: len(bound)] = FIRST_BINDING + len(values) * bound + value[bound]
    # All queries of a row are shifted together, so that no two come closer than the spacing.
    shift = random.randint(options.spacing - 1)
    place = len(bound) + options.spacing * np.arange(1, options.queries + 1) + shift
    asked = random.randint(options.keys, size=options.queries)
    tokens[place], tokens[place + 1] = keys[asked], values[value[asked]]
    supervised[place + 1] = True
    tokens[-1] = end_token
    return tokens, supervised

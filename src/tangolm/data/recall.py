"""Recall over a distance: what a model without far sources cannot know.

A row begins with one binding a key, in random order, each a single token that stands for a key and its value. Filler follows,
and queries at random places, each a key and behind it its value, which is the only supervised token. An answer needs the one
binding at the row's beginning and no other token in between: one step of similarity, up to `context` tokens back. Bytes:

    binding 64 + 8 k + v    query "!#$%"[k]    value "0" + v    filler a to z    the end token last         k < 4, v < 8

Guessing costs ln 8 = 2.08 nats an answer. (Single-token bindings, because pairs of a key and a value also have to be found as
such, which small models need far longer to learn; compare MQAR in Arora et al. 2023, arXiv:2312.04927.)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tangolm.data.shards import ShardWriter, claim, write_manifest
from tangolm.data.source import LONGEST_CONTEXT, Progress, at_least, new_manifest, no_progress, option
from tangolm.data.tokenizer import ByteTokenizer

NAME = "recall"
KEYS, VALUES = b"!#$%", b"01234567"
FILLER = b"abcdefghijklmnopqrstuvwxyz"
FIRST_BINDING = 64
FIRST_QUERY = 32  # tokens before the first query may stand


@dataclass(frozen=True)
class RecallOptions:
    """Options of `prepare recall`."""

    context: int = option(1024, "tokens a row, at least 64")
    queries: int = option(256, "queries a row")
    train_rows: int = option(2048, "rows to train on")
    dev_rows: int = option(32, "rows for development")
    test_rows: int = option(64, "rows for the test")
    seed: int = option(0, "of the rows")

    def __post_init__(self) -> None:
        at_least(2 * FIRST_QUERY, context=self.context)
        if self.context > LONGEST_CONTEXT:
            raise ValueError(f"context must be at most {LONGEST_CONTEXT:,}, got {self.context}")
        at_least(1, queries=self.queries, train_rows=self.train_rows, dev_rows=self.dev_rows, test_rows=self.test_rows)
        if self.queries > self.slots:
            raise ValueError(f"queries must be at most {self.slots} in {self.context} tokens, got {self.queries}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be 0 to {2**32 - 1}, got {self.seed}")

    @property
    def slots(self) -> int:
        """Places of two tokens where a query may stand."""
        return (self.context - 1 - FIRST_QUERY) // 2


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
    splits = {}
    for number, (split, rows) in enumerate(
        (("train", options.train_rows), ("dev", options.dev_rows), ("test", options.test_rows))
    ):
        random = np.random.RandomState([options.seed, number])  # numpy's policy freezes its stream
        writer = ShardWriter(out, split, options.context, tokenizer.vocab_size)
        for done in range(rows):
            writer.add(*_row(random, options, tokenizer.end_token))
            if done % 256 == 0:
                progress(done, rows, f"writing {split}")
        progress(rows, rows, f"writing {split}")
        splits[split] = {
            "rows": rows,
            "tokens": rows * options.context,
            "supervised_tokens": rows * options.queries,
            "documents": rows,
            "bytes": rows * (options.context - 1),
            "shards": writer.close(),
            "sources": [{"name": NAME, "documents": rows, "rows": [0, rows]}],
        }
    manifest["splits"] = splits
    write_manifest(out, manifest)
    return manifest


def _row(random: np.random.RandomState, options: RecallOptions, end_token: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and supervision of a row, [context] each."""
    keys, values, filler = (np.frombuffer(text, np.uint8) for text in (KEYS, VALUES, FILLER))
    tokens = random.choice(filler, options.context).astype(np.int64)
    supervised = np.zeros(options.context, bool)
    value = random.randint(len(values), size=len(keys))
    order = random.permutation(len(keys))
    tokens[: len(keys)] = FIRST_BINDING + len(values) * order + value[order]
    place = FIRST_QUERY + 2 * random.permutation(options.slots)[: options.queries]
    asked = random.randint(len(keys), size=options.queries)
    tokens[place], tokens[place + 1] = keys[asked], values[value[asked]]
    supervised[place + 1] = True
    tokens[-1] = end_token
    return tokens, supervised

"""A tiny prepared folder of sums in two modules, and comparing checkpoints."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from tangolm.data.shards import ShardWriter, claim, write_manifest
from tangolm.data.tokenizer import ByteTokenizer

CONTEXT = 48
# What clocks and the process say in the metrics: no two runs agree in it.
MEASURED = ("seconds", "tokens_per_s", "operations_per_s", "utilisation", "memory_bytes")
TINY = ("model.depth=2", "model.gated_width=96")


def prepare_sums(folder: Path, questions: int = 120, seed: int = 0, context: int = CONTEXT) -> Path:
    tokenizer, draw = ByteTokenizer(), random.Random(seed)
    claim(folder, "sums")
    splits = {}
    for split, count in (("train", questions), ("dev", questions // 3), ("test", questions // 3)):
        writer, sources, supervised_tokens = ShardWriter(folder, split, context, tokenizer.vocab_size), [], 0
        for module, sign in (("add", 1), ("subtract", -1)):
            first, tokens, supervised = writer.rows, [], []
            for number in range(count // 2):
                a, b = draw.randrange(100), draw.randrange(10)
                prompt = tokenizer.encode(f"{a}{'+' if sign > 0 else '-'}{b}\n")
                answer = [*tokenizer.encode(str(a + sign * b)), tokenizer.end_token]
                tokens += prompt + answer
                supervised += [False] * len(prompt) + [True] * len(answer)
                if len(tokens) > context - 10 or number == count // 2 - 1:  # the next might not fit
                    padding = context - len(tokens)
                    writer.add(
                        np.array(tokens + [tokenizer.end_token] * padding), np.array(supervised + [False] * padding)
                    )
                    supervised_tokens += sum(supervised)
                    tokens, supervised = [], []
            where = None if split == "train" else [first, writer.rows]
            sources.append({"name": f"{module}-easy", "documents": count // 2, "rows": where})
        splits[split] = {
            "rows": writer.rows,
            "tokens": writer.rows * context,
            "supervised_tokens": supervised_tokens,
            "documents": count,
            "bytes": 0,
            "sources": sources,
            "shards": writer.close(),
        }
    write_manifest(
        folder,
        {
            "format": 1,
            "dataset": "sums",
            "context": context,
            "tokenizer": tokenizer.name,
            "vocab_size": tokenizer.vocab_size,
            "end_token": tokenizer.end_token,
            "document_masking": True,
            "splits": splits,
            "modules": {"add": {"commonest_answer": "50"}, "subtract": {"commonest_answer": "50"}},
        },
    )
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {**load_file(folder / "model.safetensors"), **load_file(folder / "optimizer.safetensors")}


def same_bits(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and bool(one) and all(torch.equal(one[name], two[name]) for name in one)

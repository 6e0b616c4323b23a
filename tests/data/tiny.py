"""Small prepared folders for tests, made in milliseconds."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tangolm.data.dm_shim import LEVELS
from tangolm.data.rows import WholeDocuments
from tangolm.data.shards import ShardWriter, claim, write_manifest
from tangolm.data.source import new_manifest
from tangolm.data.text import TextOptions
from tangolm.data.tokenizer import ByteTokenizer

MODULES = ("algebra__linear_1d", "numbers__gcd")


def prepare_sums(folder: Path, rows: int = 12, context: int = 16, shard_rows: int = 5) -> dict[str, Any]:
    """A prepared folder with one sum a row ("3+4=\\n7") in each of its splits."""
    claim(folder, "text")
    options, tokenizer = TextOptions(context=context), ByteTokenizer()
    manifest = new_manifest("text", options, tokenizer, True, generated=True)
    manifest["splits"] = {}
    for split in ("train", "dev", "test"):
        packed = WholeDocuments(
            ShardWriter(folder, split, context, 257, shard_rows * context), context, tokenizer.end_token
        )
        for number in range(rows):
            prompt, answer = f"{number}+{number}=\n".encode(), str(2 * number).encode()
            packed.add(tokenizer.encode_bytes(prompt), tokenizer.encode_bytes(answer), len(prompt), len(answer))
            packed.break_row()
        entry = packed.close()
        half = rows // 2
        entry["sources"] = [
            {"name": "small", "documents": half, "rows": [0, half]},
            {"name": "large", "documents": rows - half, "rows": [half, rows]},
        ]
        manifest["splits"][split] = entry
    write_manifest(folder, manifest)
    return manifest


def write_archive(folder: Path, questions: int = 400, modules: tuple[str, ...] = MODULES) -> Path:
    """The published archive's layout with small sums; interpolate repeats some of the training questions."""
    root = folder / "mathematics_dataset-v1.0"
    for number, module in enumerate(modules):
        for level, name in enumerate(("interpolate", *(f"train-{level}" for level in LEVELS))):
            lines = []
            for index in range(20 if name == "interpolate" else questions):
                left = index if name == "interpolate" else index + 10 * level
                lines.append(f"What is {left} plus {1000 * number}?\n{left + 1000 * number}\n")
            (root / name).mkdir(parents=True, exist_ok=True)
            (root / name / f"{module}.txt").write_text("".join(lines), newline="\n")
    (root / "extrapolate").mkdir()
    (root / "extrapolate" / "algebra__polynomial_roots_big.txt").write_text("never read\n")
    (root / "train-easy" / f"._{modules[0]}.txt").write_bytes(b"\x00\x05\x16\x07")
    return folder


def pack_archive(folder: Path, tarball: Path) -> Path:
    with tarfile.open(tarball, "w:gz") as archive:
        archive.add(folder / "mathematics_dataset-v1.0", "mathematics_dataset-v1.0")
    return tarball


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def documents(split: Any) -> list[tuple[bytes, bytes]]:
    """(prompt, answer) of every document, read from the raw rows; padding is left out."""
    found = []
    for row in range(split.rows):
        tokens, supervised = split.row(row)
        start = 0
        for end in np.flatnonzero(tokens == 256):
            piece, marks = tokens[start:end], supervised[start:end]
            if supervised[end]:
                found.append((bytes(piece[~marks].tolist()), bytes(piece[marks].tolist())))
            else:
                assert start == end  # padding is an end token alone
            start = end + 1
    return found


def save_tokenizer(folder: Path) -> str:
    """A small byte-level BPE in Hugging Face's files, its end token <|end|>; how to name it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the end of the word is the other word of the others, " * 5], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return f"hf:{folder}"

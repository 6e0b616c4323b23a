"""`tangolm presets`, `tangolm count` and `tangolm generate`: what concerns models."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tangolm.cli.app import Json, console, print_json
from tangolm.data import get_tokenizer
from tangolm.evaluation import generate as generate_tokens
from tangolm.experiments.paper import count_comparisons
from tangolm.models import load_model, preset, preset_names, read_tokenizer_name, training_memory_bytes
from tangolm.training import Run


def register(app: typer.Typer) -> None:
    app.command()(presets)
    app.command()(count)
    app.command()(generate)


def presets(json: Json = False) -> None:
    """Every preset by name."""
    configs = {name: preset(name) for name in preset_names()}
    if json:
        print_json(list(configs))
        return
    wide = max(map(len, configs))
    print(f"{'preset':<{wide}}  {'d':>6}  {'F':>8}  {'parameters':>12}  without embedding")
    for name, config in configs.items():
        counted = config.parameters()
        print(
            f"{name:<{wide}}  {config.width:>6,}  {config.gated_width:>8,}  {counted['total']:>12,}  "
            f"{counted['non_embedding']:>17,}"
        )


def count(
    name: Annotated[str | None, typer.Argument(metavar="PRESET", help="Such as tango-70m-d4.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens a sequence; 8,192, for the mini tier 256.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="50,257, for the mini tier 257.")] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences of the training step whose memory is estimated.")] = 1,
    paper: Annotated[bool, typer.Option("--paper", help="Every count of the paper beside ours.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="With --paper: exit code 1 where one differs.")] = False,
    json: Json = False,
) -> None:
    """Parameters, multiply-accumulates of a forward pass, and memory of a training step."""
    if paper:
        _count_paper(strict, json)
        return
    if name is None:
        raise ValueError("PRESET is missing: give one, such as tango-70m-d4, or --paper")
    if strict:
        raise ValueError("--strict goes with --paper")
    if not 1 <= batch_size <= 2**20:
        raise ValueError(f"batch_size must be at least 1 and at most {2**20:,}, got {batch_size}")
    config = preset(name, context=context, vocab_size=vocab_size)
    result = {
        "preset": name,
        "context": config.context,
        "vocab_size": config.vocab_size,
        **config.parameters(),
        **config.macs(),
        "batch_size": batch_size,
        "training_memory_bytes": training_memory_bytes(config, batch_size),
    }
    if json:
        print_json(result)
        return
    print(f"{name} at context {config.context:,} and vocabulary {config.vocab_size:,}")
    print(f"  parameters        {result['non_embedding']:>22,} without the embedding, {result['total']:,} with it")
    print(f"  MACs, all pairs   {result['macs']:>22,} of one forward pass, head included (the paper's convention)")
    print(f"  MACs, causal      {result['useful_macs']:>22,}")
    print(f"  training memory   {result['training_memory_bytes']:>22,} bytes, estimated, float32, batch {batch_size}")


def _count_paper(strict: bool, json: bool) -> None:
    figures = count_comparisons()
    if json:
        print_json([{**dataclasses.asdict(figure), "equal": figure.equal} for figure in figures])
    else:
        table = Table("figure", "paper", "ours", "", box=None)
        for figure in figures:
            ours = f"{figure.ours:,.{figure.digits}f}"
            table.add_row(figure.where, f"{figure.paper:,}", ours, "equal" if figure.equal else "DIFFERS")
        console().print(table)
        print(f"{sum(figure.equal for figure in figures)} of {len(figures)} equal")
    if strict and not all(figure.equal for figure in figures):
        raise typer.Exit(1)


def generate(
    folder: Annotated[Path, typer.Argument(metavar="RUN_OR_DIR", help="A run (its best checkpoint) or a saved model.")],
    prompt: Annotated[str, typer.Option(help="Text to continue; - reads it from stdin.")],
    max_new_tokens: Annotated[int, typer.Option(help="At most so many tokens.")] = 100,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; above, samples.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample among so many likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample among the likeliest tokens of so much probability.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the sampled tokens.")] = 0,
    beams: Annotated[int, typer.Option(help="Above 1: search for the likeliest text with so many beams.")] = 1,
    json: Json = False,
) -> None:
    """Continue a text.

    A model of dm-mathematics wants a question and a newline: printf 'What is 1 + 1?\\n' | tangolm generate RUN --prompt -
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be in [0, 2**32), got {seed}")
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give a run or the folder of a saved model")
    if Run.exists(folder) and (folder / "checkpoints").is_dir():
        run = Run(folder)
        folder, model = run.best(), run.load("best")
    else:
        model = load_model(folder)
    tokenizer = get_tokenizer(read_tokenizer_name(folder))
    text = sys.stdin.read() if prompt == "-" else prompt
    [tokens] = generate_tokens(
        model,
        [tokenizer.encode(text)],
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_token=tokenizer.end_token,
        beams=beams,
    )
    answer = tokenizer.decode(tokens)
    if json:
        print_json({"prompt": text, "text": answer, "tokens": tokens})
    else:
        print(answer)

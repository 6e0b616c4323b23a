"""`tangolm bench`: correctness first, then time and memory beside a naive form or another model."""

from __future__ import annotations

import json as json_
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tangolm.bench import bars, decode, head, op, train
from tangolm.cli.app import Commands, Json, items, print_json

DEFAULT, HEAD = op.Options(), head.Options()
Models = Annotated[str, typer.Argument(help="Comma-separated; the others are compared with the first.")]
Check = Annotated[bool, typer.Option("--check", help="Exit code 1 where a bar set for these sizes is missed.")]
Out = Annotated[Path | None, typer.Option(help="Also write the result as JSON to this file.")]


class Benchmarks(Commands):
    """Its unknown commands are unknown benchmarks."""

    what = "benchmark"


def register(app: typer.Typer) -> None:
    group = typer.Typer(cls=Benchmarks, help="Measure speed and memory, correctness first.")
    for name, command in (("op", bench_op), ("train", bench_train), ("decode", bench_decode), ("head", bench_head)):
        group.command(name)(command)
    app.add_typer(group, name="bench")


def bench_op(
    batch: Annotated[int, typer.Option(help="B, sequences.")] = DEFAULT.batch,
    heads: Annotated[int, typer.Option(help="H.")] = DEFAULT.heads,
    tokens: Annotated[int, typer.Option(help="T.")] = DEFAULT.tokens,
    key_width: Annotated[int, typer.Option(help="D, channels of a head's query and key.")] = DEFAULT.key_width,
    gate_width: Annotated[int, typer.Option(help="E, gate channels of a head.")] = DEFAULT.gate_width,
    dtype: Annotated[str, typer.Option(help=f"One of: {', '.join(op.DTYPES)}.")] = DEFAULT.dtype,
    impl: Annotated[str, typer.Option(help="Implementation; auto takes the fastest.")] = DEFAULT.impl,
    repeats: Annotated[int, typer.Option(help="Timed pairs, of which medians are given.")] = DEFAULT.repeats,
    check: Annotated[bool, typer.Option("--check", help="Exit code 1 below the bar of this shape.")] = False,
    out: Out = None,
    json: Json = False,
) -> None:
    """The gate averaging, forward and backward, against its naive form."""
    options = op.Options(batch, heads, tokens, key_width, gate_width, dtype, impl, repeats)
    if check:
        bars.about(op.BARS, options, ["op"])  # refuse a shape without a bar before measuring for minutes
    result = op.run(options)
    _show(result.to_dict(), op.render(result), out, json)
    if not result.correct:
        raise typer.Exit(1)
    if check:
        _judge(op.BARS, options, {"op": result})


def bench_train(
    models: Models = "loop-mini-d4,tango-mini-d4,tango-mini-d4:naive",
    tokens: Annotated[int, typer.Option(help="T.")] = 256,
    batch: Annotated[int, typer.Option(help="B, sequences.")] = 8,
    repeats: Annotated[int, typer.Option(help="Rounds, of which medians are given.")] = 3,
    memory: Annotated[
        bool, typer.Option("--memory/--no-memory", help="Also peak memory, each in a new process.")
    ] = True,
    check: Check = False,
    out: Out = None,
    json: Json = False,
) -> None:
    """Training steps of models in turn; PRESET, PRESET:recompute or PRESET:naive."""
    options = train.Options(tuple(items(models)), tokens, batch, repeats, memory)
    result = train.run(options)
    _show(result.to_dict(), train.render(result), out, json)
    if check:
        _judge(train.BARS, options, {row.model: row for row in result.rows})


def bench_decode(
    models: Models = "loop-mini-d4@256,tango-mini-d4@256",
    repeats: Annotated[int, typer.Option(help="Rounds, of which medians are given.")] = 9,
    full: Annotated[bool, typer.Option("--full/--no-full", help="Also the forward pass over all tokens.")] = True,
    check: Check = False,
    out: Out = None,
    json: Json = False,
) -> None:
    """A step of generation of models in turn; PRESET@TOKENS, the tokens being cached."""
    options = decode.Options(tuple(items(models)), repeats, full)
    result = decode.run(options)
    _show(result.to_dict(), decode.render(result), out, json)
    if check:
        _judge(decode.BARS, options, {row.model: row for row in result.rows})


def bench_head(
    tokens: Annotated[int, typer.Option(help="T.")] = HEAD.tokens,
    width: Annotated[int, typer.Option(help="d.")] = HEAD.width,
    vocabulary: Annotated[int, typer.Option(help="V.")] = HEAD.vocabulary,
    repeats: Annotated[int, typer.Option(help="Timed pairs, of which medians are given.")] = HEAD.repeats,
    check: Check = False,
    out: Out = None,
    json: Json = False,
) -> None:
    """The head's loss by blocks against the version with logits."""
    options = head.Options(tokens, width, vocabulary, repeats)
    result = head.run(options)
    _show(result.to_dict(), head.render(result), out, json)
    if check:
        _judge(head.BARS, options, {"head": result})


def _show(data: dict[str, Any], lines: list[str], out: Path | None, json: bool) -> None:
    if out is not None:
        out.write_text(json_.dumps(data, indent=1, allow_nan=False) + "\n")
    if json:
        print_json(data)
    else:
        print("\n".join(lines))


def _judge(known: tuple[bars.Bar, ...], options: Any, rows: dict[str, Any]) -> None:
    verdicts = bars.judge(known, options, rows)
    for line, _ in verdicts:
        print(line, file=sys.stderr)
    if not all(met for _, met in verdicts):
        raise typer.Exit(1)

"""`tangolm bench op`: correctness first, then time, share of the product rate and memory beside the naive form."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tangolm.bench import op
from tangolm.cli.app import Commands, Json, print_json

DEFAULT = op.Options()


class Benchmarks(Commands):
    """Its unknown commands are unknown benchmarks."""

    what = "benchmark"


def register(app: typer.Typer) -> None:
    group = typer.Typer(cls=Benchmarks, help="Measure speed and memory, correctness first.")
    group.callback()(lambda: None)  # one command is still a group
    group.command("op")(bench_op)
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
    json: Json = False,
) -> None:
    """The gate averaging, forward and backward, against its naive form."""
    options = op.Options(batch, heads, tokens, key_width, gate_width, dtype, impl, repeats)
    if check:
        op.bar_of(options)  # refuse a shape without a bar before measuring for minutes
    result = op.run(options)
    if json:
        print_json(result.to_dict())
    else:
        print("\n".join(op.render(result)))
    if check:
        missed = op.shortfalls(result)
        for line in missed:
            print(line, file=sys.stderr)
        if missed:
            raise typer.Exit(1)
    if not result.correct:
        raise typer.Exit(1)

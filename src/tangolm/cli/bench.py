"""`tangolm bench`: correctness first, then time and memory beside a naive form or another model."""

from __future__ import annotations

import json as json_
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tangolm.bench import bars, decode, dry_run, growth, head, op, processes, train
from tangolm.cli.app import Commands, Json, items, print_json, whole_numbers
from tangolm.report import write_growth

DEFAULT, HEAD, GROWTH, PROCESSES = op.Options(), head.Options(), growth.Options(), processes.Options()
PROBED = dry_run.Options()
Models = Annotated[str, typer.Argument(help="Comma-separated; the others are compared with the first.")]
Check = Annotated[bool, typer.Option("--check", help="Exit code 1 where a bar set for these sizes is missed.")]
Out = Annotated[Path | None, typer.Option(help="Also write the result as JSON to this file.")]


class Benchmarks(Commands):
    """Its unknown commands are unknown benchmarks."""

    what = "benchmark"


def register(app: typer.Typer) -> None:
    group = typer.Typer(cls=Benchmarks, help="Measure speed and memory, correctness first.")
    for command in (
        bench_op,
        bench_train,
        bench_decode,
        bench_head,
        bench_growth,
        bench_dry_run,
        bench_processes,
        bench_plot,
    ):
        group.command(command.__name__.removeprefix("bench_").replace("_", "-"))(command)
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
    _run(train, options, lambda result: {row.model: row for row in result.rows}, check, out, json)


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
    _run(decode, options, lambda result: {row.model: row for row in result.rows}, check, out, json)


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
    _run(head, options, lambda result: {"head": result}, check, out, json)


def bench_growth(
    form: Annotated[str, typer.Argument(help="windowed or full.")] = GROWTH.form,
    lengths: Annotated[str, typer.Option(help="T, comma-separated, each twice the one before.")] = ",".join(
        map(str, GROWTH.lengths)
    ),
    heads: Annotated[int, typer.Option(help="H.")] = GROWTH.heads,
    key_width: Annotated[int, typer.Option(help="D, channels of a head's query and key.")] = GROWTH.key_width,
    gate_width: Annotated[int, typer.Option(help="E, gate channels of a head.")] = GROWTH.gate_width,
    repeats: Annotated[int, typer.Option(help="Rounds, of which medians are given.")] = GROWTH.repeats,
    check: Check = False,
    out: Out = None,
    json: Json = False,
) -> None:
    """How time and memory of the gate averaging, forward and backward, grow with T."""
    numbers = tuple(whole_numbers(lengths, "--lengths"))
    options = growth.Options(form, numbers, heads, key_width, gate_width, repeats)  # pyright: ignore[reportArgumentType]
    _run(growth, options, lambda result: {"growth": result}, check, out, json)


def bench_dry_run(
    cases: Annotated[str, typer.Argument(help=f"Comma-separated, of: {', '.join(dry_run.CASES)}.")] = ",".join(
        dry_run.CASES
    ),
    steps: Annotated[int, typer.Option(help="Length of the runs.")] = PROBED.steps,
    repeats: Annotated[int, typer.Option(help="Rounds, of which medians are given.")] = PROBED.repeats,
    check: Check = False,
    out: Out = None,
    json: Json = False,
) -> None:
    """What the probe of a dry run says, against runs of some steps."""
    options = dry_run.Options(tuple(items(cases)), steps, repeats)
    _run(dry_run, options, lambda result: {row.case: row for row in result.rows}, check, out, json)


def bench_processes(
    model: Annotated[str, typer.Argument(help="Preset.")] = PROCESSES.model,
    count: Annotated[int, typer.Option("--processes", help="How many, against one.")] = PROCESSES.processes,
    parallel: Annotated[str, typer.Option(help="How they hold the model: ddp or fsdp.")] = PROCESSES.parallel,
    tokens: Annotated[int, typer.Option(help="T.")] = PROCESSES.tokens,
    batch: Annotated[int, typer.Option(help="B, sequences of all processes.")] = PROCESSES.batch,
    steps: Annotated[int, typer.Option(help="Of each run.")] = PROCESSES.steps,
    repeats: Annotated[int, typer.Option(help="Rounds, of which medians are given.")] = PROCESSES.repeats,
    check: Check = False,
    out: Out = None,
    json: Json = False,
) -> None:
    """Training in several processes against one, on this machine's cores: tokens a second, and the losses beside."""
    options = processes.Options(model, count, parallel, tokens, batch, steps, repeats)  # pyright: ignore[reportArgumentType]
    _run(processes, options, lambda result: {"processes": result}, check, out, json)


def bench_plot(
    results: Annotated[list[Path], typer.Argument(help="Files that `bench growth --out` wrote.")],
    out: Annotated[Path, typer.Option(help="The drawing: .svg, .png or .pdf.")],
) -> None:
    """Draw time and memory against T."""
    print(f"drawing: {write_growth(results, out)}")


def _run(
    benchmark: Any, options: Any, rows: Callable[[Any], dict[str, Any]], check: bool, out: Path | None, json: bool
) -> None:
    """Measure, show, and hold what `rows` takes of the result against the benchmark's bars."""
    result = benchmark.run(options)
    _show(result.to_dict(), benchmark.render(result), out, json)
    if check:
        _judge(benchmark.BARS, options, rows(result))


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

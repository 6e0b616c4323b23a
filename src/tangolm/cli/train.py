"""`tangolm train`, `tangolm evaluate` and `tangolm report`: what concerns runs."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tangolm.cli.app import Json, print_json, progress
from tangolm.config import override
from tangolm.experiments.answers import answer_run
from tangolm.report import write_report
from tangolm.training import Run, RunConfig, evaluate_run, plan, run_config, run_config_from
from tangolm.training import train as train_run
from tangolm.training.distributed import joined
from tangolm.training.init_from import find_origin
from tangolm.training.progress import duration
from tangolm.training.run import RESOLVE


def register(app: typer.Typer) -> None:
    app.command()(train)
    app.command()(evaluate)
    app.command()(report)


def train(
    out: Annotated[Path, typer.Option(help="Folder of the run.")],
    preset: Annotated[str | None, typer.Option(help="Such as tango-mini-d4; `tangolm presets` lists all.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder that `tangolm prepare` or `tangolm data mix` made.")] = None,
    init_from: Annotated[
        Path | None,
        typer.Option(help="Begin with the weights of a run (its best checkpoint), a checkpoint or a saved model."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Override a field: optimizer.peak_lr=1e-3; repeatable."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Length in optimizer steps.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Length in tokens, at most.")] = None,
    epochs: Annotated[
        float | None, typer.Option(help="Length in passes over the data; 1 where nothing is said.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Sequences an optimizer step (8).")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint of the run in --out.")
    ] = False,
    stop_after: Annotated[int | None, typer.Option(help="Save and stop after so many steps; --resume goes on.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what the run would be, and from one step what it would cost.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress display.")] = False,
    json: Json = False,
) -> None:
    """Train a model on prepared data; interrupt it and go on with --resume."""
    fields = {"steps": steps, "tokens": tokens, "epochs": epochs, "batch_size": batch_size}
    if stop_after is not None and stop_after < 1:
        raise ValueError(f"stop_after must be at least 1 step, got {stop_after}")
    given = {key: value for key, value in fields.items() if value is not None}
    with joined() as world:
        config = world.agree(lambda: _config(out, preset, data, init_from, set_ or [], given, resume))
        if dry_run:
            planned = world.on_first(
                lambda: plan(
                    config, out, probe=True, note=lambda line: print(line, file=sys.stderr, flush=True), world=world
                )
            )
            if world.first:
                print_json(planned) if json else _print_plan(planned)
            return
        result = train_run(config, out, resume=resume, stop_after=stop_after, progress=not quiet)
    if not world.first:
        raise typer.Exit(result.exit_code)
    if json:
        print_json(
            {key: str(value) if isinstance(value, Path) else value for key, value in dataclasses.asdict(result).items()}
        )
    else:
        print(result.message)
        if result.best_nll is not None:
            print(f"lowest development NLL {result.best_nll:.4f} nats at step {result.best_step}; run in {out}")
    raise typer.Exit(result.exit_code)


def _config(
    out: Path,
    preset: str | None,
    data: Path | None,
    init_from: Path | None,
    assignments: list[str],
    fields: dict[str, Any],
    resume: bool,
) -> RunConfig:
    begun = resume and Run.exists(out)
    if resume and preset is None and init_from is None and not begun:
        raise ValueError(f"run {out} does not exist, so --resume has nothing to go on with; give --preset and --data")
    if preset is not None or (init_from is not None and not begun):
        if data is None and begun:
            data = Path(Run(out).config.data)
        if data is None:
            raise ValueError("--data is missing: give the folder that `tangolm prepare` made")
        if init_from is not None:
            return run_config_from(init_from, data, assignments, preset_name=preset, **fields)
        assert preset is not None
        return run_config(preset, data, assignments, **fields)
    if not begun:
        raise ValueError(
            "--preset is missing: give one, such as tango-mini-d4 (or --init-from, or --resume with the --out of a run)"
        )
    # A run knows its own configuration; what is given besides must agree with it, and the trainer checks that.
    config = Run(out).config
    if data is not None:
        config = dataclasses.replace(config, data=str(data.resolve()))
    if init_from is not None:
        origin = find_origin(init_from)
        config = dataclasses.replace(config, init_from=str(origin.folder), init_sha256=origin.sha256)
    lengths = {"steps": None, "tokens": None, "epochs": None} if fields.keys() & {"steps", "tokens", "epochs"} else {}
    config = dataclasses.replace(config, **{**lengths, **fields})
    return override(config, assignments, resolve=RESOLVE)


def _print_plan(planned: dict[str, Any]) -> None:
    schedule, data = planned["schedule"], planned["data"]
    parameters, probe = planned["parameters"], planned["probe"]
    peak = probe["peak_memory_bytes"]
    peak = "peak n/a on this device" if peak is None else f"peak of the probe {peak / 2**20:,.0f} MiB"
    lr = ", ".join(f"{rate:.2e} at step {int(step):,}" for step, rate in schedule["lr"].items())
    rows = {
        "run": planned["run_id"],
        "device": f"{planned['device']} ({planned['device_name']}), {planned['precision']}, impl {planned['impl']}",
        "parameters": f"{parameters['total']:,} ({parameters['non_embedding']:,} without the embedding)",
        "MACs a sequence": f"{planned['macs_per_sequence']:,} ({planned['useful_macs_per_sequence']:,} causal)",
        "memory": f"at least {planned['training_memory_bytes'] / 2**20:,.0f} MiB for a pass of {planned['micro_batch']} sequences; "
        f"{peak}",
        "length": f"{planned['steps']:,} steps, {planned['tokens']:,} tokens, {planned['epochs']:.2f} epochs",
        "batch": f"{planned['batch_size']} sequences in {planned['passes_per_step']} passes",
        "data": f"{data['train_rows']:,} rows, {data['supervised_share']:.1%} of the tokens supervised; "
        f"{data['dev_rows']:,} development rows",
        "learning rate": f"warm-up {schedule['warmup_steps']} steps; {lr}",
        "evaluation": f"every {planned['evaluate_every']} steps, checkpoint every {planned['checkpoint_every']}",
        "time": f"{duration(3600 * probe['hours_total'])}: {probe['seconds_per_step']:.3g} s a step, "
        f"{probe['evaluations']} evaluations of {probe['seconds_per_evaluation']:.3g} s",
        "rate": f"{probe['tokens_per_s']:,.0f} tokens/s, {probe['operations_per_s'] / 1e9:,.1f} G operations/s, utilisation "
        + ("n/a" if probe["utilisation"] is None else f"{probe['utilisation']:.1%}"),
    }
    for name, text in rows.items():
        print(f"{name:>16}: {text}")
    if planned["warning"] is not None:
        print(f"{'warning':>16}: {planned['warning']}")


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    split: Annotated[Literal["dev", "test"], typer.Option(help="dev, or test: met once, its result is kept.")] = "dev",
    data: Annotated[
        Path | None, typer.Option(help="Where the run's data is now, if it was moved; or other data to evaluate on.")
    ] = None,
    answers: Annotated[
        bool, typer.Option("--answers", help="Also generate answers to the test questions and count exact ones.")
    ] = False,
    json: Json = False,
) -> None:
    """NLL of the selected checkpoint (lowest development NLL) on a whole split."""
    if answers:
        if data is not None:
            raise ValueError(f"--data {data} does not go with --answers, which reads the data where the run found it")
        _answers(run, split, json)
        return
    result = evaluate_run(run, split, data=data)
    if json:
        print_json(result)
        return
    print(
        f"{split} NLL {result['nll']:.4f} nats a token ({result['nll_sum']:,.1f} over {result['tokens']:,} tokens), "
        f"next-token accuracy {result['accuracy']:.1%}, step {result['step']}"
    )
    if data is not None:
        own = result["data_sha256"] == Run(run).config.data_sha256
        whose = "the run's own" if own else f"not the run's: its manifest hashes to {result['data_sha256'][:12]}.."
        print(f"on {data} ({whose})")
    if result.get("parts"):
        print(f"(the mean of {len(result['parts'])} parts)")
    for name, own in [*result.get("parts", {}).items(), *result["sources"].items()]:
        print(f"  {name:<50} {own['nll']:8.4f}  {own['tokens']:>9,} tokens")


def _answers(run: Path, split: str, json: bool) -> None:
    if split != "test":
        raise ValueError(f"--answers are generated for --split test only, got --split {split}")
    with progress() as shown:
        result = answer_run(Run(run), progress=shown)
    if json:
        print_json(result)
        return
    print(f"exactly right: {result['correct']} of {result['questions']} ({result['accuracy']:.1%})")
    for name, text in (("untrained", "untrained model"), ("commonest", "commonest answer of the module")):
        if result[name] is not None:
            print(f"  {text}: {result[name]:.1%}")
    for sample in result["samples"]:
        mark = "right" if sample["correct"] else "wrong"
        print(f"  {sample['prompt'].strip()!r}: {sample['generated']!r} ({mark}; right is {sample['answer']!r})")


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")],
) -> None:
    """One self-contained page over runs: curves, table, configurations, generated answers."""
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out} must be a file in a folder that exists, such as report.html")
    print(f"report: {write_report(runs, out)}")

"""The tables of runs: rows of text that the page and the terminal share, and the terminal's rendering of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tangolm.experiments.quickstart import QuickstartResult
from tangolm.experiments.statistics import spread, wilson
from tangolm.report import numbers
from tangolm.report.numbers import MISSING
from tangolm.report.runs import RunRecord, read_runs


@dataclass(frozen=True)
class Row:
    """A line of a table of runs: one text a run, `details` under them, `best` the indices that win the row."""

    label: str
    values: tuple[str, ...]
    details: tuple[str, ...] = ()
    best: frozenset[int] = frozenset()


def summary_rows(runs: Sequence[RunRecord]) -> list[Row]:
    """What the runs are and how they did, one row a figure."""
    parameters = [run.config.model.parameters() for run in runs]
    macs = [run.config.model.macs() for run in runs]
    contexts = [f"of {run.config.model.context:,} tokens" for run in runs]
    best, last = [run.best for run in runs], [run.last for run in runs]
    rows = [
        _row("Architecture", runs, lambda run: run.architecture),
        _row("State", runs, lambda run: run.state),
        Row(
            "Parameters",
            tuple(numbers.count(p["non_embedding"]) for p in parameters),
            tuple(f"{numbers.count(p['total'])} with the embedding" for p in parameters),
        ),
        Row(
            "Multiply-accumulates a sequence, forward",
            tuple(numbers.short(m["macs"]) for m in macs),
            tuple(
                f"{c}; causally needed {numbers.short(m['useful_macs'])}" for c, m in zip(contexts, macs, strict=True)
            ),
        ),
        _row("Tokens trained on", runs, lambda run: None if run.tokens is None else numbers.count(run.tokens)),
        _lowest(
            "Best development NLL, nats a token",
            [_figure(record, "nll") for record in best],
            tuple(f"at step {record['step']:,}" if record else "" for record in best),
        ),
        _lowest(
            "Final development NLL, nats a token",
            [_figure(record, "nll") for record in last],
            tuple(
                "" if record is None else f"at step {record['step']:,}" + ("" if run.finished else ", the last so far")
                for run, record in zip(runs, last, strict=True)
            ),
        ),
        _lowest(
            "Test NLL, nats a token",
            [_figure(run.test, "nll") for run in runs],
            tuple(
                f"{numbers.count(run.test['tokens'])} tokens counted; checkpoint of step {run.test['step']:,}"
                if run.test
                else ""
                for run in runs
            ),
        ),
    ]
    if any(run.answers for run in runs):
        rows += _answer_rows(runs)
    rows.append(
        _row(
            "Training rate, tokens/s",
            runs,
            lambda run: None if run.tokens_per_second is None else numbers.rate(run.tokens_per_second),
        )
    )
    if any(run.operations_per_second for run in runs):
        rows.append(
            _row(
                "Model operations a second",
                runs,
                lambda run: None if run.operations_per_second is None else numbers.short(run.operations_per_second),
            )
        )
    if any(run.temperatures for run in runs):
        rows.append(_row("Temperatures of the heads, first to last evaluation", runs, _temperatures))
    if any(run.peak_memory_bytes for run in runs):
        rows.append(
            _row(
                "Peak memory",
                runs,
                lambda run: None if run.peak_memory_bytes is None else numbers.gibibytes(run.peak_memory_bytes),
            )
        )
    return rows


def seed_rows(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Mean and sample standard deviation for each configuration that was run with several seeds.

    A row is configuration, seeds, best and final development NLL, test NLL, exact answers; empty where no configuration
    was run twice. Runs without a figure are not in its mean: its n says so.
    """
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(run.group(), []).append(run)
    rows = []
    for members in groups.values():
        if len(members) < 2:
            continue
        seeds = ", ".join(f"{run.config.model_seed}/{run.config.data_seed}" for run in members)
        model = members[0].config.model
        rows.append(
            [
                f"{members[0].architecture}, depth {model.depth}, width {model.width}",
                seeds,
                _mean([_figure(run.best, "nll") for run in members]),
                _mean([_figure(run.last, "nll") for run in members if run.finished]),
                _mean([_figure(run.test, "nll") for run in members]),
                _mean([_figure(run.answers, "accuracy") for run in members], scale=100, digits=1, unit=" %"),
            ]
        )
    return rows


SEED_COLUMNS = (
    "Configuration",
    "Seeds (model/data)",
    "Best development NLL",
    "Final development NLL",
    "Test NLL",
    "Exact answers",
)


@dataclass(frozen=True)
class ModuleRow:
    """A module of the test split; for each run its NLL and its (right answers, questions), None where not measured."""

    module: str
    tokens: int | None
    nll: tuple[float | None, ...]
    exact: tuple[tuple[int, int] | None, ...]


def module_rows(runs: Sequence[RunRecord]) -> list[ModuleRow]:
    """Every module that any run was judged on, in order."""
    nll = [(run.test or {}).get("sources", {}) for run in runs]
    exact = [(run.answers or {}).get("modules", {}) for run in runs]
    rows = []
    for module in sorted({name for part in [*nll, *exact] for name in part}):
        entries = [part.get(module) for part in exact]
        counts = {part[module]["tokens"] for part in nll if module in part}
        rows.append(
            ModuleRow(
                module,
                counts.pop() if len(counts) == 1 else None,
                tuple(part[module]["nll"] if module in part else None for part in nll),
                tuple(None if entry is None else (entry["correct"], entry["questions"]) for entry in entries),
            )
        )
    return rows


@dataclass(frozen=True)
class Answered:
    """A question, its right answer, and what each run said (text, right or not), None where it was not asked."""

    module: str | None
    prompt: str
    answer: str
    given: tuple[tuple[str, bool] | None, ...]


def answered(runs: Sequence[RunRecord]) -> list[Answered]:
    """The kept answers of all runs, question by question."""
    said: dict[tuple[str | None, str, str], dict[int, tuple[str, bool]]] = {}
    for index, run in enumerate(runs):
        for sample in (run.answers or {}).get("samples", []):
            key = (sample["module"], sample["prompt"].removesuffix("\n"), sample["answer"])
            said.setdefault(key, {})[index] = (sample["generated"], sample["correct"])
    return [Answered(*key, tuple(given.get(index) for index in range(len(runs)))) for key, given in said.items()]


def configuration_rows(runs: Sequence[RunRecord], base: Path) -> list[Row]:
    """The fields in which the configurations differ; none for a single run."""
    flat = [_flat(run.configuration(base)) for run in runs]
    fields = list(dict.fromkeys(name for part in flat for name in part))
    rows = [Row(name, tuple(part.get(name, "—") for part in flat)) for name in fields]
    return [row for row in rows if len(set(row.values)) > 1]


def environment_rows(runs: Sequence[RunRecord]) -> list[Row]:
    """Versions and device of each run's last start, and how often it was started."""
    found = [dict(run.environment or {}) for run in runs]
    earlier = [part.pop("earlier", None) for part in found]
    starts = [MISSING if part is None else str(len(part) + 1) for part in earlier]
    names = list(dict.fromkeys(name for part in found for name in part if name not in ("step", "peak_memory_bytes")))
    rows = [Row(name.replace("_", " "), tuple(_plain(part.get(name)) for part in found)) for name in names]
    return [*rows, Row("starts", tuple(starts))] if any(found) else []


def quickstart_lines(result: QuickstartResult, questions: int = 8) -> RenderableType:
    """What `tangolm quickstart` prints at its end: the table, some answers, what it took."""
    runs = read_runs(result.runs)
    parts: list[RenderableType] = [summary_table(runs)]
    if any(run.answers for run in runs):
        parts += [Text(), answers_table(runs, questions)]
    origins = {run.answers["origin"] for run in runs if run.answers and run.answers.get("origin")}
    if "generated" in origins:
        parts.append(
            Text("The questions were generated here by the data set's own program; they are not its official test.")
        )
    took = f"took {result.seconds:.0f} s" if result.trained else "all of it was done before; nothing was trained"
    if result.peak_memory_bytes is not None and result.trained:
        took += f", at most {numbers.gibibytes(result.peak_memory_bytes)} of memory"
    parts.append(Text(f"{took}; everything is in {result.folder}"))
    if result.message is not None:
        parts.append(Text(result.message))
    return Group(*parts)


def summary_table(runs: Sequence[RunRecord]) -> Table:
    """`summary_rows` for the terminal."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for run in runs:
        table.add_column(Text(run.name), justify="right")
    for row in summary_rows(runs):
        cells = []
        for index, value in enumerate(row.values):
            cell = Text(value, style="bold" if index in row.best else "")
            if row.details and row.details[index]:
                cell.append(f"\n{row.details[index]}", style="dim")
            cells.append(cell)
        table.add_row(Text(row.label), *cells)
    return table


def answers_table(runs: Sequence[RunRecord], limit: int) -> Table:
    """Some questions with the right answer and each run's, evenly spaced, for the terminal."""
    found = answered(runs)
    shown = [found[index * len(found) // limit] for index in range(limit)] if limit < len(found) else found
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=Text(f"{len(shown)} of the held-out questions, evenly spaced"),
        title_justify="left",
    )
    table.add_column("question", ratio=3)
    table.add_column("right answer", ratio=1)
    for run in runs:
        table.add_column(Text(run.name), ratio=1)
    for item in shown:
        cells = [
            Text(MISSING, style="dim")
            if given is None
            else Text(f"{'✓' if given[1] else '✗'} {given[0]}", style="green" if given[1] else "")
            for given in item.given
        ]
        table.add_row(Text(item.prompt), Text(item.answer), *cells)
    return table


def _row(label: str, runs: Sequence[RunRecord], value: Callable[[RunRecord], str | None]) -> Row:
    return Row(label, tuple(MISSING if (text := value(run)) is None else text for run in runs))


def _temperatures(run: RunRecord) -> str | None:
    if run.temperatures is None:
        return None
    return " to ".join(f"{fmean(taus):.2f} ({min(taus):.2f}–{max(taus):.2f})" for taus in run.temperatures)


def _lowest(label: str, values: Sequence[float | None], details: tuple[str, ...]) -> Row:
    return Row(label, tuple(MISSING if v is None else numbers.nats(v) for v in values), details, _winners(values, min))


def _winners(values: Sequence[float | None], choose: Callable[[list[float]], float]) -> frozenset[int]:
    """The runs that win a row: only where every run was measured and not all are equal."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or len(set(known)) < 2:
        return frozenset()
    return frozenset(index for index, value in enumerate(known) if value == choose(known))


def _answer_rows(runs: Sequence[RunRecord]) -> list[Row]:
    values, details = [], []
    for run in runs:
        if run.answers is None:
            values.append(MISSING)
            details.append("")
            continue
        correct, questions = run.answers["correct"], run.answers["questions"]
        low, high = wilson(correct, questions)
        values.append(numbers.percent(run.answers["accuracy"]))
        details.append(
            f"{numbers.count(correct)} of {numbers.count(questions)}; 95 % interval {100 * low:.1f} to {100 * high:.1f}"
        )
    best = _winners([_figure(run.answers, "accuracy") for run in runs], max)
    rows = [Row("Test questions answered exactly", tuple(values), tuple(details), best)]
    for label, name in (("the same model untrained", "untrained"), ("the module's commonest answer", "commonest")):
        shares = [(run.answers or {}).get(name) for run in runs]
        rows.append(Row(f"· {label}", tuple(MISSING if s is None else numbers.percent(s) for s in shares)))
    return rows


def _figure(record: Mapping[str, Any] | None, name: str) -> float | None:
    return None if record is None else record[name]


def _mean(values: Sequence[float | None], scale: float = 1.0, digits: int = 3, unit: str = "") -> str:
    known = [value for value in values if value is not None]
    return numbers.mean_sd(spread(known), scale, digits) + unit if known else MISSING


def _flat(data: Mapping[str, Any], where: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in data.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{where}{name}.")
        else:
            found[f"{where}{name}"] = _plain(value)
    return found


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)

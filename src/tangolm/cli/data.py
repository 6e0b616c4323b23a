"""`tangolm prepare DATASET`: one command a data set, its options those of the data set's dataclass."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from tangolm.cli.app import Commands, Json, items, print_json, progress
from tangolm.data import DATASETS, DataSet
from tangolm.data import prepare as prepare_data


class Datasets(Commands):
    """Its unknown commands are unknown data sets."""

    what = "dataset"


def register(app: typer.Typer) -> None:
    group = typer.Typer(cls=Datasets, help="Turn a corpus into a folder that training reads.")
    for name, dataset in DATASETS.items():
        group.command(name, help=f"Prepare {dataset.summary}.")(_command(name, dataset))
    app.add_typer(group, name="prepare")


def _command(name: str, dataset: DataSet) -> Callable[..., None]:
    """The command of a data set: source and out, and an option a field of its options."""

    def run(out: Path, source: Path | None, overwrite: bool, json: bool, **options: Any) -> None:
        fields = {field.name: field.default for field in dataclasses.fields(dataset.options)}
        options = {key: items(value) if isinstance(fields[key], tuple) else value for key, value in options.items()}
        with progress() as report:
            manifest = prepare_data(name, source, out, overwrite=overwrite, progress=report, **options)
        if json:
            print_json(manifest)
            return
        for split, entry in manifest["splits"].items():
            print(
                f"{split:>5}: {entry['documents']:,} documents, {entry['rows']:,} rows of {manifest['context']}, "
                f"{entry['supervised_tokens']:,} supervised tokens"
            )
        for line in _remarks(manifest):
            print(line)
        print(f"ready in {out}")

    source_help = "File or folder to read." + (
        "" if dataset.needs_source else " Without it, the data is generated, streamed, or what this machine has."
    )
    parameters: dict[str, tuple[Any, Any]] = {
        "out": (Annotated[Path, typer.Option(help="New folder for the prepared data.")], ...),
        "source": (Annotated[Path | None, typer.Option(help=source_help)], None),
        "overwrite": (Annotated[bool, typer.Option("--overwrite", help="Replace prepared data in --out.")], False),
        "json": (Json, False),
    }
    hints = typing.get_type_hints(dataset.options)
    for field in dataclasses.fields(dataset.options):
        default = ",".join(field.default) if isinstance(field.default, tuple) else field.default
        text = field.metadata["help"] + (" (comma-separated)" if isinstance(field.default, tuple) else "")
        option = typer.Option(help=text[0].upper() + text[1:] + ".")
        parameters[field.name] = (Annotated[_option_type(hints[field.name]), option], default)
    kind = inspect.Parameter.KEYWORD_ONLY
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(key, kind, annotation=hint, default=inspect.Parameter.empty if value is ... else value)
            for key, (hint, value) in parameters.items()
        ]
    )
    run.__annotations__ = {key: hint for key, (hint, _) in parameters.items()}
    return run


def _option_type(hint: Any) -> Any:
    """What the command line can parse: a tuple is a comma-separated text, a literal a text that the options check."""
    origin = get_origin(hint)
    if origin in (tuple, Literal):
        return str
    if origin in (typing.Union, types.UnionType):
        kinds = [_option_type(kind) for kind in get_args(hint) if kind is not type(None)]
        return kinds[0] | None
    return hint


def _remarks(manifest: dict[str, Any]) -> list[str]:
    """What the reader of the counts should know of where the data comes from."""
    remarks = []
    if manifest.get("generated"):
        remarks.append("generated here: its test split is no official test set")
    stream = manifest.get("stream")
    if isinstance(stream, str) and stream != "as recorded":
        remarks.append(f"warning: the stream of questions {stream}")
    return remarks

"""`tangolm data show` and `tangolm data mix`: what concerns prepared folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from tangolm.cli.app import Commands, Json, console, print_json, progress
from tangolm.data import mix as mix_data
from tangolm.data import show as show_data

SHOWN = 4000  # characters of the sample that are printed; --json has all
BAR = 40  # characters of the longest bar of the histogram
STYLES = {"supervised": "bold green", "given": "dim", "end": "reverse", "padding": "dim reverse"}


def register(app: typer.Typer) -> None:
    group = typer.Typer(cls=Commands, help="Look into prepared folders, and make one of several.")
    group.command()(show)
    group.command()(mix)
    app.add_typer(group, name="data")


def mix(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Two or more prepared folders.")],
    out: Annotated[Path, typer.Option(help="New folder for the mixture; the parts stay where they are.")],
    schedule: Annotated[
        str | None, typer.Option(help="alternate: a batch of each part in turn; weights: the part of a batch is drawn.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Of the parts, in their order, such as 3,1; goes with --schedule weights.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the mixture in --out.")] = False,
    json: Json = False,
) -> None:
    """Make a mixture of prepared folders, which training reads as one."""
    numbers = None if weights is None else _numbers(weights)
    kind = schedule or ("alternate" if weights is None else "weights")
    manifest = mix_data(folders, out, schedule=kind, weights=numbers, overwrite=overwrite)
    if json:
        print_json(manifest)
        return
    _print_summary(manifest)
    print(f"ready in {out}")


def show(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A prepared folder or a mixture.")],
    split: Annotated[str, typer.Option(help="Split to look into: train, dev or test.")] = "train",
    row: Annotated[int, typer.Option(help="Row to show; -1 is the last.")] = 0,
    json: Json = False,
) -> None:
    """What a prepared folder holds: counts, the lengths of its documents, a row with the supervised part marked."""
    with progress() as report:
        found = show_data(folder, split, row, report)
    if json:
        print_json(found)
        return
    _print_summary(found["manifest"])
    for name, lengths in found["lengths"].items():
        _print_lengths(f"{name}, {split}", lengths)
    _print_sample(found["sample"], split)


def _numbers(text: str) -> list[float]:
    try:
        return [float(item) for item in text.split(",")]
    except ValueError:
        raise ValueError(f"weights {text!r} is no list of numbers; write them as 3,1") from None


def _print_summary(manifest: dict[str, Any]) -> None:
    origin = f" ({manifest['origin']})" if manifest.get("origin") else ""
    print(
        f"{manifest['dataset']}{origin}: tokenizer {manifest['tokenizer']} ({manifest['vocab_size']:,} ids), "
        f"rows of {manifest['context']:,} tokens"
    )
    if "parts" in manifest:
        print(f"schedule {manifest['schedule']}:")
        for part in manifest["parts"]:
            print(f"  {part['name']:<24} {part['dataset']}, weight {part['weight']:g}, {_seen(part)}")
    else:
        print(_seen(manifest))
    for name, value in manifest.get("arguments", {}).items():
        print(f"  {name} = {value}")
    for name, count in manifest.get("passed_over", {}).items():
        print(f"  passed over: {name} {count:,}" if isinstance(count, int) else f"  passed over: {name} {count}")
    for split, entry in manifest["splits"].items():
        print(
            f"{split:>5}: {entry['documents']:,} documents, {entry['bytes']:,} bytes, {entry['rows']:,} rows, "
            f"{entry['tokens']:,} tokens, {entry['supervised_tokens']:,} supervised"
        )


def _seen(manifest: dict[str, Any]) -> str:
    return f"documents of a row {'do not see' if manifest['document_masking'] else 'see'} each other"


def _print_lengths(name: str, lengths: dict[str, Any]) -> None:
    if not lengths["documents"]:
        print(f"\n{name}: no document ends in it")
        return
    rate = lengths["bytes_per_token"]
    print(
        f"\n{name}: {lengths['documents']:,} documents of {lengths['shortest']:,} to {lengths['longest']:,} tokens, "
        f"{lengths['mean']:,.1f} in the mean" + (f"; {rate:.3f} supervised bytes a token" if rate else "")
    )
    most = max(entry["documents"] for entry in lengths["histogram"])
    for entry in lengths["histogram"]:
        bar = "#" * -(-BAR * entry["documents"] // most)
        print(f"{entry['from']:>11,} to {entry['to']:>11,}  {bar:<{BAR}}  {entry['documents']:,}")


def _print_sample(sample: dict[str, Any], split: str) -> None:
    shown = console()
    place = f"row {sample['row']:,} of {split}" + (f", of the part {sample['part']}" if sample["part"] else "")
    print(f"\n{place}; {'supervised: bold green' if shown.is_terminal else 'supervised: between [+ and +]'}")
    shown.print(_sample(sample["pieces"], shown), soft_wrap=True)


def _sample(pieces: list[dict[str, Any]], shown: Console) -> Text:
    """The row as text: styled on a terminal, with marks elsewhere."""
    result, left = Text(), SHOWN
    for piece in pieces:
        kind, text = piece["kind"], _printable(piece["text"])
        if len(text) > left:
            text = f"{text[:left]}..."
        left -= len(text)
        if kind == "end":
            text = "<end>"
        elif kind == "padding":
            text = f"<padding x {piece['tokens']:,}>"
        elif kind == "supervised" and not shown.is_terminal:
            text = f"[+{text}+]"
        result.append(text, STYLES[kind] if shown.is_terminal else "")
        if left < 0:
            result.append("\n(the whole row is in --json)")
            break
    return result


def _printable(text: str) -> str:
    """Text that cannot steer a terminal: control characters but line ends and tabs are written as escapes."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)

"""Mixtures: prepared folders that a run reads as one, batch by batch of one part or another.

A mixture is a folder with `mixture.json`, which names its parts, their manifests' sha256 and the schedule; no shard is
copied. `read_data`, `open_data` and `data_sha256` take a prepared folder or a mixture.

    {"format": 1, "schedule": "alternate", "weights": [1.0, 1.0],
     "parts": [{"name": "source", "folder": "../source", "sha256": ".."}, ..]}

Folders are relative to the mixture's own, so that all can be moved together. The joint NLL of a mixture is the arithmetic
mean of its parts' (see `evaluation.nll`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tangolm.config import ConfigError, from_dict, to_dict
from tangolm.data.manifest import MANIFEST, SplitEntry, read_manifest, write_json
from tangolm.data.schedule import Schedule
from tangolm.data.shards import Split, open_split

FORMAT = 1
MIXTURE = "mixture.json"
SHARED = ("context", "tokenizer", "vocab_size", "end_token")  # what the parts must agree in
COUNTS = ("rows", "tokens", "supervised_tokens", "documents", "bytes")


@dataclass(frozen=True)
class Part:
    """A prepared folder of a mixture; `sha256` is of its manifest, which names every shard with its own."""

    name: str
    folder: str
    sha256: str


@dataclass(frozen=True)
class Mixture:
    """What `mixture.json` says."""

    format: int
    schedule: str
    weights: tuple[float, ...]
    parts: tuple[Part, ...]


class MixedSplit:
    """A split of a mixture: the rows of its parts, one part behind the other.

    It has what readers use of `Split`; its entry has the sums of the parts' counts and neither shards nor sources.
    """

    def __init__(
        self, folder: Path, name: str, manifest: dict[str, Any], parts: dict[str, Split], schedule: Schedule
    ) -> None:
        self.folder, self.name, self.manifest, self.parts, self.schedule = folder, name, manifest, parts, schedule
        self.entry = SplitEntry(**manifest["splits"][name], shards=(), sources=())
        self.rows: int = self.entry.rows
        self.context: int = manifest["context"]
        self.end_token: int = manifest["end_token"]
        self.first: list[int] = np.cumsum([0, *(part.rows for part in parts.values())]).tolist()
        self._splits = list(parts.values())

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Row `index`: tokens int64 [context], supervised bool [context].

        Raises:
            ValueError: no such row.
        """
        part, within = self._place(index)
        return part.row(within)

    def masked(self, index: int) -> bool:
        """Whether the documents of row `index` are kept from seeing each other."""
        return self._place(index)[0].document_masking

    def verify(self, progress: Callable[[int, int, str], None] | None = None) -> None:
        """Hash every shard of every part.

        Raises:
            ValueError: a shard's bytes are not those that were prepared; its file is named.
        """
        for part in self._splits:
            part.verify(progress)

    def _place(self, index: int) -> tuple[Split, int]:
        if not 0 <= index < self.rows:
            raise ValueError(f"row {index} is outside the {self.rows} rows of the split {self.name!r}")
        part = int(np.searchsorted(self.first, index, side="right")) - 1
        return self._splits[part], index - self.first[part]


def mix(
    folders: Sequence[str | Path],
    out: str | Path,
    *,
    schedule: str = "alternate",
    weights: Sequence[float] | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Make a mixture of prepared folders; a part is named after its folder.

    Args:
        folders: two or more prepared folders.
        out: a new or empty folder.
        schedule: "alternate": a batch of each part in turn; "weights": the part of each batch is drawn.
        weights: of the parts, with schedule "weights"; all alike where None.
        overwrite: replace the mixture that `out` already holds.

    Returns:
        The mixture's manifest, as `read_data` gives it.

    Raises:
        ValueError: fewer than two parts, parts of one name, parts that do not fit each other, or an `out` in use.
    """
    paths = [Path(folder).resolve() for folder in folders]
    if weights is not None and len(weights) != len(paths):
        raise ValueError(f"weights has {len(weights)} for {len(paths)} parts; give one for each")
    plan = Schedule(schedule, tuple(float(weight) for weight in weights or [1.0] * len(paths)))
    out = Path(out)
    found = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if out.exists() and not out.is_dir():
        raise ValueError(f"out {str(out)!r} is a file; name a folder")
    if foreign := [name for name in found if name != MIXTURE]:
        raise ValueError(f"out {str(out)!r} holds {foreign[0]!r}, which is no mixture; name a new or empty folder")
    if found and not overwrite:
        raise ValueError(f"out {str(out)!r} already holds a mixture; name another folder, or overwrite it")
    for path in paths:
        if (path / MIXTURE).is_file():
            raise ValueError(f"data {str(path)!r} is a mixture itself; name its parts instead")
        read_manifest(path)
    mixture = Mixture(
        FORMAT,
        plan.kind,
        plan.weights,
        tuple(Part(path.name, os.path.relpath(path, out.resolve()), _sha256(path / MANIFEST)) for path in paths),
    )
    manifest = _manifest(out, mixture)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / MIXTURE, to_dict(mixture))
    return manifest


def read_data(folder: str | Path) -> dict[str, Any]:
    """The manifest of a prepared folder, or that of a mixture: what its parts agree in, and the sums of their counts.

    Raises:
        ValueError: as `read_manifest`; a damaged mixture, a part that is missing or was prepared anew.
    """
    folder = Path(folder)
    return _manifest(folder, _read(folder)) if is_mixture(folder) else read_manifest(folder)


def open_data(folder: str | Path, split: str) -> Split | MixedSplit:
    """Open a split of a prepared folder or of a mixture.

    Raises:
        ValueError: as `read_data` and `open_split`.
    """
    folder = Path(folder)
    if not is_mixture(folder):
        return open_split(folder, split)
    mixture = _read(folder)
    manifest = _manifest(folder, mixture)
    parts = {part.name: open_split(_path(folder, part), split) for part in mixture.parts}
    return MixedSplit(folder, split, manifest, parts, Schedule(mixture.schedule, mixture.weights))


def data_sha256(folder: str | Path) -> str:
    """The hash that ties a run to its data: of the manifest, or of all of a mixture but where its parts lie.

    Raises:
        ValueError: as `read_data`.
    """
    folder = Path(folder)
    if not is_mixture(folder):
        return _sha256(folder / MANIFEST)
    mixture = to_dict(_read(folder))
    for part in mixture["parts"]:
        del part["folder"]
    return hashlib.sha256(json.dumps(mixture, sort_keys=True).encode()).hexdigest()


def is_mixture(folder: str | Path) -> bool:
    """Whether `folder` is a mixture rather than prepared data."""
    return (Path(folder) / MIXTURE).is_file()


def _read(folder: Path) -> Mixture:
    path = folder / MIXTURE
    try:
        mixture = from_dict(Mixture, json.loads(path.read_bytes()))
        if mixture.format != FORMAT:
            raise ConfigError(f"format must be {FORMAT}, got {mixture.format}")
        if len(mixture.weights) != len(mixture.parts):
            raise ConfigError(f"it has {len(mixture.weights)} weights for {len(mixture.parts)} parts")
        Schedule(mixture.schedule, mixture.weights)
    except (ValueError, TypeError) as error:
        raise ValueError(f"data {str(path)!r} is no mixture that can be read: {error}; make it again") from error
    return mixture


def _manifest(folder: Path, mixture: Mixture) -> dict[str, Any]:
    """The manifest of a mixture, its parts read and compared."""
    names = [part.name for part in mixture.parts]
    for name in names:
        if not name or names.count(name) > 1:
            raise ValueError(f"two parts of the mixture have the name {name!r}; rename a folder")
    manifests = {part.name: _part_manifest(folder, part) for part in mixture.parts}
    first = manifests[names[0]]
    for name, manifest in manifests.items():
        for key in SHARED:
            if manifest[key] != first[key]:
                raise ValueError(
                    f"part {name!r} of the mixture has {key} {manifest[key]!r}, but {names[0]!r} has {first[key]!r}; "
                    "prepare them alike"
                )
    common = [split for split in first["splits"] if all(split in other["splits"] for other in manifests.values())]
    return {
        "format": FORMAT,
        "dataset": "mixture",
        **{key: first[key] for key in SHARED},
        "schedule": mixture.schedule,
        "parts": [
            {
                "name": part.name,
                "dataset": manifests[part.name]["dataset"],
                "document_masking": manifests[part.name]["document_masking"],
                "weight": weight,
                "sha256": part.sha256,
            }
            for part, weight in zip(mixture.parts, mixture.weights, strict=True)
        ],
        "splits": {
            split: {count: sum(other["splits"][split][count] for other in manifests.values()) for count in COUNTS}
            for split in common
        },
    }


def _path(folder: Path, part: Part) -> Path:
    return Path(os.path.normpath(folder.resolve() / part.folder))


def _part_manifest(folder: Path, part: Part) -> dict[str, Any]:
    path = _path(folder, part)
    manifest = read_manifest(path)
    if _sha256(path / MANIFEST) != part.sha256:
        raise ValueError(
            f"part {part.name!r} of the mixture {str(folder)!r} was prepared anew in {str(path)!r}; make the mixture again"
        )
    return manifest


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

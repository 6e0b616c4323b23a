from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tangolm.data import Loader, MixedSplit, data_sha256, mix, open_data, prepare, questions, read_data
from tangolm.data.loader import evaluation_batches
from tangolm.data.mixture import MIXTURE
from tests.data.tiny import prepare_sums


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Two folders that fit each other: 12 masked rows of sums and some of running text."""
    prepare_sums(tmp_path / "sums", rows=12, context=16)
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question. " * 20)
    prepare("text", tmp_path / "a.txt", tmp_path / "text", context=16)
    return [tmp_path / "sums", tmp_path / "text"]


def opened(folder: Path, split: str = "train") -> MixedSplit:
    found = open_data(folder, split)
    assert isinstance(found, MixedSplit)
    return found


@pytest.mark.case(25, 26)
@pytest.mark.parametrize("weights", [None, [1.0, 3.0]])
def test_each_window_of_each_part_is_read_once_an_epoch_of_it(
    parts: list[Path], tmp_path: Path, weights: list[float] | None
) -> None:
    mix(parts, tmp_path / "mixed", schedule="weights" if weights else "alternate", weights=weights)
    split = opened(tmp_path / "mixed")
    size = 5
    loader = Loader(split, size, data_seed=101)
    read: dict[str, list[int]] = {"sums": [], "text": []}
    for batch in range(60):
        rows = loader.batch(size * batch).sample_ids.tolist()
        names = {"sums" if row < split.first[1] else "text" for row in rows}
        assert len(names) == 1  # a batch is of one part
        name = names.pop()
        if weights is None:
            assert name == ("sums", "text")[batch % 2]
        read[name] += [row - split.first[name == "text"] for row in rows]
    for name, part in split.parts.items():
        assert len(read[name]) > 2 * part.rows
        # The order is the one that the part has alone: each of its windows once an epoch.
        alone = Loader(part, size, data_seed=101)
        assert read[name] == [alone.row_of(sample) for sample in range(len(read[name]))]
        assert sorted(read[name][: part.rows]) == sorted(read[name][part.rows : 2 * part.rows]) == [*range(part.rows)]


@pytest.mark.parametrize("schedule", ["alternate", "weights"])
def test_the_union_over_processes_is_the_whole_batch_and_needs_no_state(
    parts: list[Path], tmp_path: Path, schedule: str
) -> None:
    mix(parts, tmp_path / "mixed", schedule=schedule)
    split = opened(tmp_path / "mixed")
    whole = [Loader(split, 6, 7).batch(6 * step).sample_ids.tolist() for step in range(20)]
    for ranks in (2, 3):
        share = 6 // ranks
        for step, rows in enumerate(whole):
            taken = [Loader(split, 6, 7).batch(6 * step + share * rank, share) for rank in range(ranks)]
            assert [row for batch in taken for row in batch.sample_ids.tolist()] == rows
    assert Loader(split, 6, 7).batch(6 * 19, 2).sample_ids.tolist() == whole[19][:2]  # a shorter last batch


def test_rows_labels_and_documents_are_those_of_the_part(parts: list[Path], tmp_path: Path) -> None:
    mix(parts, tmp_path / "mixed")
    split = opened(tmp_path / "mixed")
    loader = Loader(split, 4, 101)
    for start, part in ((0, split.parts["sums"]), (4, split.parts["text"])):
        batch, alone = loader.batch(start), Loader(part, 4, 101).batch(0)
        assert torch.equal(batch.input_ids, alone.input_ids)
        assert torch.equal(batch.labels, alone.labels)
        assert (batch.document_ids is None) == (alone.document_ids is None) == (not part.document_masking)
        if batch.document_ids is not None and alone.document_ids is not None:
            assert torch.equal(batch.document_ids, alone.document_ids)
    both = loader.batch(0, 8).document_ids  # rows that see all of themselves are one document
    assert both is not None
    assert both[:4].any()
    assert not both[4:].any()
    in_order = [row for batch in evaluation_batches(split, 7) for row in batch.sample_ids.tolist()]
    assert in_order == list(range(split.rows))
    with pytest.raises(ValueError, match=f"row {split.rows} is outside"):
        split.row(split.rows)


def test_the_manifest_has_what_the_parts_share_and_the_sums_of_their_counts(parts: list[Path], tmp_path: Path) -> None:
    manifest = mix(parts, tmp_path / "mixed", schedule="weights", weights=[3, 1])
    assert manifest == read_data(tmp_path / "mixed")
    own = [read_data(part) for part in parts]
    assert (manifest["dataset"], manifest["context"], manifest["tokenizer"]) == ("mixture", 16, "bytes")
    assert [(part["name"], part["weight"], part["document_masking"]) for part in manifest["parts"]] == [
        ("sums", 3.0, True),
        ("text", 1.0, False),
    ]
    for split, entry in manifest["splits"].items():
        for name, value in entry.items():
            assert value == sum(part["splits"][split][name] for part in own)
    assert open_data(parts[0], "dev").manifest == own[0]  # prepared data is opened as ever


def test_all_can_be_moved_together_and_the_hash_stays(parts: list[Path], tmp_path: Path) -> None:
    mix(parts, tmp_path / "mixed")
    sha256 = data_sha256(tmp_path / "mixed")
    (tmp_path / "there").mkdir()
    for name in ("mixed", "sums", "text"):
        (tmp_path / name).rename(tmp_path / "there" / name)
    assert data_sha256(tmp_path / "there" / "mixed") == sha256
    assert opened(tmp_path / "there" / "mixed").rows
    mix([tmp_path / "there" / "sums", tmp_path / "there" / "text"], tmp_path / "far" / "mixed")
    assert data_sha256(tmp_path / "far" / "mixed") == sha256
    mix([tmp_path / "there" / "text", tmp_path / "there" / "sums"], tmp_path / "other")
    mix([tmp_path / "there" / "sums", tmp_path / "there" / "text"], tmp_path / "drawn", schedule="weights")
    assert len({sha256, data_sha256(tmp_path / "other"), data_sha256(tmp_path / "drawn")}) == 3


@pytest.mark.case(29)
def test_a_part_that_changed_is_named(parts: list[Path], tmp_path: Path) -> None:
    mix(parts, tmp_path / "mixed")
    shard = parts[1] / "train-00000.tokens.npy"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"text/train-00000\.tokens\.npy' is damaged"):
        opened(tmp_path / "mixed").verify()
    prepare_sums(tmp_path / "again", rows=13, context=16)
    shutil.rmtree(parts[0])
    with pytest.raises(ValueError, match="sums' does not exist"):
        read_data(tmp_path / "mixed")
    (tmp_path / "again").rename(parts[0])
    for read in (read_data, lambda folder: open_data(folder, "train")):
        with pytest.raises(ValueError, match=r"part 'sums' of the mixture .* was prepared anew"):
            read(tmp_path / "mixed")


def test_parts_that_do_not_fit_are_refused_by_name(parts: list[Path], tmp_path: Path) -> None:
    prepare_sums(tmp_path / "wide", context=32)
    with pytest.raises(ValueError, match="part 'wide' of the mixture has context 32, but 'sums' has 16"):
        mix([parts[0], tmp_path / "wide"], tmp_path / "mixed")
    with pytest.raises(ValueError, match="two parts of the mixture have the name 'sums'"):
        mix([parts[0], parts[0]], tmp_path / "mixed")
    with pytest.raises(ValueError, match="at least 2 parts, got 1"):
        mix(parts[:1], tmp_path / "mixed")
    with pytest.raises(ValueError, match="weights has 3 for 2 parts"):
        mix(parts, tmp_path / "mixed", schedule="weights", weights=[1, 2, 3])
    with pytest.raises(ValueError, match="none' does not exist"):
        mix([parts[0], tmp_path / "none"], tmp_path / "mixed")
    assert not (tmp_path / "mixed").exists()
    mix(parts, tmp_path / "mixed")
    with pytest.raises(ValueError, match="is a mixture itself; name its parts"):
        mix([parts[0], tmp_path / "mixed"], tmp_path / "more")
    with pytest.raises(ValueError, match="is a mixture; questions are read from prepared data"):
        questions(opened(tmp_path / "mixed"))


def test_a_mixture_is_kept_unless_overwritten_and_others_folders_are_left_alone(
    parts: list[Path], tmp_path: Path
) -> None:
    mix(parts, tmp_path / "mixed")
    before = (tmp_path / "mixed" / MIXTURE).read_bytes()
    with pytest.raises(ValueError, match="already holds a mixture"):
        mix(parts, tmp_path / "mixed", schedule="weights")
    assert (tmp_path / "mixed" / MIXTURE).read_bytes() == before
    mix(parts, tmp_path / "mixed", schedule="weights", overwrite=True)
    assert read_data(tmp_path / "mixed")["schedule"] == "weights"
    with pytest.raises(ValueError, match=r"holds 'dev-00000\.supervised\.npy', which is no mixture"):
        mix(parts, parts[0], overwrite=True)
    with pytest.raises(ValueError, match=r"holds 'mixture\.json'"):
        prepare("text", tmp_path / "a.txt", tmp_path / "mixed", overwrite=True)
    with pytest.raises(ValueError, match="is a file"):
        mix(parts, tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format must be 1, got 2"),
        ({"weights": [1.0]}, "1 weights for 2 parts"),
        ({"weights": [1.0, 1.0, 1.0]}, "3 weights for 2 parts"),
        ({"schedule": "now and then"}, "schedule 'now and then' is not known"),
        ({"parts": None}, "parts must be a list"),
        ({"extra": 1}, "unknown key 'extra'"),
    ],
)
def test_a_damaged_mixture_is_named(parts: list[Path], tmp_path: Path, change: dict, message: str) -> None:
    mix(parts, tmp_path / "mixed")
    path = tmp_path / "mixed" / MIXTURE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=rf"(?s)mixture\.json' is no mixture that can be read: .*({message})"):
        read_data(tmp_path / "mixed")
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ValueError, match=r"mixture\.json' is no mixture that can be read"):
        data_sha256(tmp_path / "mixed")

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tangolm.data.shards import ShardWriter, open_split
from tests.data.tiny import documents, prepare_sums


def test_rows_come_back_across_shards(tmp_path: Path) -> None:
    manifest = prepare_sums(tmp_path, rows=12, shard_rows=5)
    split = open_split(tmp_path, "dev")
    assert [shard["rows"] for shard in manifest["splits"]["dev"]["shards"]] == [5, 5, 2]
    assert (split.rows, split.context, split.end_token, split.document_masking) == (12, 16, 256, True)
    assert documents(split) == [(f"{n}+{n}=\n".encode(), str(2 * n).encode()) for n in range(12)]
    tokens, supervised = split.row(7)
    assert tokens.dtype == np.int64
    assert supervised.dtype == bool
    split.verify()


@pytest.mark.parametrize("row", [-1, 12, 1000])
def test_rows_that_are_not_there_are_refused(tmp_path: Path, row: int) -> None:
    prepare_sums(tmp_path)
    with pytest.raises(ValueError, match=f"row {row} is outside the 12 rows"):
        open_split(tmp_path, "train").row(row)


@pytest.mark.parametrize("split", ["validation", "tran"])
def test_an_unknown_split_is_refused(tmp_path: Path, split: str) -> None:
    prepare_sums(tmp_path)
    with pytest.raises(ValueError, match=f"split '{split}' is not in"):
        open_split(tmp_path, split)


@pytest.mark.case(29)
@pytest.mark.parametrize("suffix", ["tokens.npy", "supervised.npy"])
def test_every_changed_byte_is_found_and_the_shard_named(tmp_path: Path, suffix: str) -> None:
    prepare_sums(tmp_path, rows=4)
    path = tmp_path / f"train-00000.{suffix}"
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(ValueError, match=r"train-00000\.\w+\.npy' is damaged"):
            open_split(tmp_path, "train").verify()
    path.write_bytes(whole)
    open_split(tmp_path, "train").verify()


@pytest.mark.parametrize("suffix", ["tokens.npy", "supervised.npy"])
def test_a_missing_cut_or_exchanged_shard_is_refused_when_opened(tmp_path: Path, suffix: str) -> None:
    prepare_sums(tmp_path, rows=4)
    path = tmp_path / f"train-00000.{suffix}"
    whole = path.read_bytes()
    for wrong in (whole[:-1], whole[:40], b""):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match=rf"train-00000\.{suffix}' is damaged") as caught:
            open_split(tmp_path, "train")
        assert "\n" not in str(caught.value)
    np.save(path, np.zeros((4, 8), np.float32))
    with pytest.raises(ValueError, match="as the manifest states"):
        open_split(tmp_path, "train")
    np.save(path, np.array([{"code": "runs"}], dtype=object))  # a pickle must not be read
    with pytest.raises(ValueError, match=r"no readable .npy"):
        open_split(tmp_path, "train")
    path.unlink()
    with pytest.raises(ValueError, match="it is missing"):
        open_split(tmp_path, "train")


def test_context_and_data_set_that_contradict_the_shards_are_refused(tmp_path: Path) -> None:
    manifest = prepare_sums(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"context": 32}))
    with pytest.raises(ValueError, match=r"is not uint16 \[5, 32\] as the manifest states"):
        open_split(tmp_path, "train")


def test_a_fully_supervised_shard_has_no_second_file(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train", 4, 257, shard_tokens=8)
    for marks in ([True] * 4, [True] * 4, [True] * 3 + [False]):
        writer.add(np.arange(4), np.array(marks))
    shards = writer.close()
    assert [sorted(shard["sha256"]) for shard in shards] == [["tokens.npy"], ["supervised.npy", "tokens.npy"]]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_large_vocabulary_takes_wider_numbers(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train", 2, 2**16 + 1)
    writer.add(np.array([2**16, 1]), np.ones(2, bool))
    writer.close()
    saved = np.load(tmp_path / "train-00000.tokens.npy", allow_pickle=False)
    assert saved.dtype == np.uint32
    assert saved.tolist() == [[2**16, 1]]

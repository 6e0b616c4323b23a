from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tangolm.data.loader import Loader, evaluation_batches
from tangolm.data.shards import Split, open_split
from tests.data.tiny import prepare_sums


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Split:
    folder = tmp_path_factory.mktemp("sums")
    prepare_sums(folder, rows=12)
    return open_split(folder, "train")


def order(loader: Loader, start: int, count: int) -> list[int]:
    return [loader.row_of(sample) for sample in range(start, start + count)]


@pytest.mark.case(25)
def test_stopped_after_3_of_12_the_other_9_follow(split: Split) -> None:
    straight = order(Loader(split, 3, data_seed=101), 0, 12)
    assert sorted(straight) == list(range(12))
    assert straight != list(range(12))
    first = Loader(split, 3, data_seed=101).batch(0).sample_ids.tolist()
    rest = Loader(split, 3, data_seed=101)  # a new process knows the number 3 and nothing else
    assert first + [row for start in (3, 6, 9) for row in rest.batch(start).sample_ids.tolist()] == straight


@pytest.mark.case(24)
def test_stopped_twice_the_sample_ids_are_those_of_the_straight_run(split: Split) -> None:
    straight = [Loader(split, 5, 103).batch(5 * step).sample_ids.tolist() for step in range(30)]
    chained = []
    for part in range(3):
        loader = Loader(split, 5, 103)
        chained += [loader.batch(5 * step).sample_ids.tolist() for step in range(10 * part, 10 * part + 10)]
    assert chained == straight


@pytest.mark.case(26)
def test_three_epochs_of_a_tiny_corpus(split: Split) -> None:
    epochs = [order(Loader(split, 5, 107), 12 * epoch, 12) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs == [order(Loader(split, 5, 107), 12 * epoch, 12) for epoch in range(3)]
    assert epochs != [order(Loader(split, 5, 108), 12 * epoch, 12) for epoch in range(3)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    asked=st.lists(st.integers(0, 500), max_size=12),
)
def test_a_sample_is_a_pure_function_and_each_row_is_read_once_an_epoch(
    split: Split, seed: int, sizes: list[int], asked: list[int]
) -> None:
    loader = Loader(split, 4, seed)
    for sample in asked:  # whatever was read before
        loader.row_of(sample)
    start, seen = 0, []
    for size in sizes:
        seen += loader.batch(start, size).sample_ids.tolist()
        start += size
    assert seen == order(Loader(split, 1, seed), 0, start)
    for epoch in range(start // 12):
        assert sorted(seen[12 * epoch : 12 * epoch + 12]) == list(range(12))


def test_the_order_is_the_one_recorded(split: Split) -> None:
    assert order(Loader(split, 4, 101), 0, 24) == RECORDED


def test_labels_and_documents_are_those_of_the_row(split: Split) -> None:
    (row,) = [n for n in range(split.rows) if bytes(split.row(n)[0][:3].tolist()) == b"3+3"]
    batch = next(b for b in evaluation_batches(split, 1) if b.sample_ids.tolist() == [row])
    text = b"3+3=\n6"
    assert batch.input_ids.tolist() == [[*text, *[256] * 10]]
    assert batch.labels.tolist() == [[*[-100] * 5, ord("6"), 256, *[-100] * 9]]
    assert batch.document_ids is not None
    # The end token is of its document; each token of padding is a document of its own.
    assert batch.document_ids.tolist() == [[*[0] * 7, *range(1, 10)]]
    for tensor in (batch.input_ids, batch.labels, batch.document_ids, batch.sample_ids):
        assert tensor.dtype == torch.int64


@pytest.mark.case(21)
@pytest.mark.parametrize("batch_size", [1, 3, 5, 8, 12, 100])
def test_evaluation_reads_every_row_once_in_order(split: Split, batch_size: int) -> None:
    rows = [row for batch in evaluation_batches(split, batch_size) for row in batch.sample_ids.tolist()]
    assert rows == list(range(12))
    limited = [row for batch in evaluation_batches(split, batch_size, 7) for row in batch.sample_ids.tolist()]
    assert limited == [0, 1, 3, 5, 6, 8, 10]  # evenly spaced
    assert [r for b in evaluation_batches(split, batch_size, 99) for r in b.sample_ids.tolist()] == rows


def test_arguments_out_of_range_are_refused(split: Split, tmp_path: Path) -> None:
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"batch_size must be at least 1, got {size}"):
            Loader(split, size, 0)
        with pytest.raises(ValueError, match="batch_size must be at least 1"):
            evaluation_batches(split, size)
        with pytest.raises(ValueError, match="limit_rows must be at least 1"):
            evaluation_batches(split, 1, size)
        with pytest.raises(ValueError, match="count >= 1"):
            Loader(split, 1, 0).batch(0, size)
    with pytest.raises(ValueError, match="start >= 0"):
        Loader(split, 1, 0).batch(-1)
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match="data_seed must be 0 to"):
            Loader(split, 1, seed)
    prepare_sums(tmp_path, rows=0)
    with pytest.raises(ValueError, match="has no rows"):
        Loader(open_split(tmp_path, "train"), 1, 0)
    with pytest.raises(ValueError, match="has no rows"):
        evaluation_batches(open_split(tmp_path, "train"), 1)


RECORDED = [1, 8, 11, 9, 10, 3, 0, 6, 7, 2, 4, 5, 2, 1, 11, 7, 4, 9, 10, 5, 3, 0, 8, 6]

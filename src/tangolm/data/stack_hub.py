"""The parquet parts of a data set on the Hugging Face hub, read as a stream at one commit."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

from tangolm.data.stack_rows import permuted

if TYPE_CHECKING:
    from tangolm.data.stack_parquet import Parts

BLOCK = 2**23  # bytes that are fetched together


def hub_parts(dataset: str, revision: str, seed: int) -> tuple[Parts, str]:
    """The parts of a data set, and the commit that `revision` is now; they are read at that commit, whatever comes later.

    Args:
        dataset: its name, such as "HuggingFaceCode/stack-v3-train".
        revision: a branch, a tag or a commit.
        seed: of the order of the parts.

    Raises:
        ValueError: the hub cannot be reached, knows no such data set, or it has no parquet.
    """
    try:
        from huggingface_hub import HfApi, HfFileSystem

        from tangolm.data.stack_parquet import Parts
    except ImportError as error:
        raise ValueError("the hub needs the packages datasets and pyarrow; pip install 'tangolm[data]'") from error
    try:
        info = HfApi().dataset_info(dataset, revision=revision)
    except Exception as error:  # the hub's client has many kinds, of the network and of its own
        raise ValueError(
            f"hub {dataset!r} at revision {revision!r} cannot be listed ({type(error).__name__}: {error}); check the name "
            "and the network, or give --source with parquet files"
        ) from error
    names = permuted((file.rfilename for file in info.siblings or () if file.rfilename.endswith(".parquet")), seed)
    if not names:
        raise ValueError(f"hub {dataset!r} at revision {revision!r} has no parquet; name another data set")
    assert info.sha is not None
    return Parts(names, partial(_open, HfFileSystem(), f"datasets/{dataset}@{info.sha}")), info.sha


def _open(files: Any, root: str, name: str) -> BinaryIO:
    try:
        return files.open(f"{root}/{name}", "rb", block_size=BLOCK)
    except Exception as error:
        raise ValueError(f"part {name!r} cannot be opened ({error}); run again to go on behind what is done") from error

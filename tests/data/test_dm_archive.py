from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tangolm.data import open_split, prepare, questions
from tangolm.data.dm_archive import DEV_ONE_IN
from tests.data.tiny import MODULES, contents, documents, pack_archive, write_archive

SOURCES = [f"{module}-{level}" for module in MODULES for level in ("easy", "hard", "medium")]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_archive(tmp_path_factory.mktemp("archive"))


def test_folder_inner_folder_and_tarball_give_the_same(archive: Path, tmp_path: Path) -> None:
    manifest = prepare("dm-mathematics", archive, tmp_path / "a")
    prepare("dm-mathematics", archive / "mathematics_dataset-v1.0", tmp_path / "b")
    prepare("dm-mathematics", pack_archive(archive, tmp_path / "m.tar.gz"), tmp_path / "c")
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")
    assert manifest["generated"] is False
    assert manifest["origin"] == "official archive layout"
    assert "stream" not in manifest
    assert manifest["held_out_one_in"] == DEV_ONE_IN


def test_sources_are_sampled_equally_and_the_splits_are_apart(archive: Path, tmp_path: Path) -> None:
    manifest = prepare("dm-mathematics", archive, tmp_path)
    found = {split: documents(open_split(tmp_path, split)) for split in ("train", "dev", "test")}
    prompts = {split: {prompt for prompt, _ in pairs} for split, pairs in found.items()}
    assert not prompts["train"] & prompts["dev"]
    assert not prompts["train"] & prompts["test"]
    assert not prompts["dev"] & prompts["test"]
    entry = manifest["splits"]["train"]
    assert [source["name"] for source in entry["sources"]] == SOURCES
    counts = {source["documents"] for source in entry["sources"]}
    assert len(counts) == 1
    assert entry["documents"] == len(found["train"]) == 6 * counts.pop()
    assert len(found["test"]) == 40
    assert manifest["passed_over"]["in_test"] > 0  # the training files repeat test questions
    answers = Counter(answer for prompt, answer in found["train"] if b" 0?" in prompt)
    assert manifest["modules"][MODULES[0]]["commonest_answer"] == min(answers, key=lambda a: (-answers[a], a)).decode()
    for source in manifest["splits"]["dev"]["sources"] + manifest["splits"]["test"]["sources"]:
        assert source["name"] in MODULES
    for question in questions(open_split(tmp_path, "test")):
        plus = b" 0?" if question.module == MODULES[0] else b" 1000?"
        assert bytes(question.prompt_ids).endswith(plus + b"\n")


def test_limits_a_source(archive: Path, tmp_path: Path) -> None:
    limits = {"train_per_source": 7, "dev_per_module": 4, "test_per_module": 5}
    manifest = prepare("dm-mathematics", archive, tmp_path, **limits)
    assert {source["documents"] for source in manifest["splits"]["train"]["sources"]} == {7}
    assert {source["documents"] for source in manifest["splits"]["dev"]["sources"]} == {4}
    assert {source["documents"] for source in manifest["splits"]["test"]["sources"]} == {5}
    assert manifest["arguments"]["train_per_source"] == 7


def test_one_module(archive: Path, tmp_path: Path) -> None:
    manifest = prepare("dm-mathematics", archive, tmp_path, modules=[MODULES[1]])
    assert list(manifest["modules"]) == [MODULES[1]]
    assert len(manifest["splits"]["train"]["sources"]) == 3


def test_long_questions_are_passed_over(tmp_path: Path) -> None:
    root = write_archive(tmp_path / "in")
    path = root / "mathematics_dataset-v1.0" / "interpolate" / f"{MODULES[0]}.txt"
    path.write_text(f"{'q' * 161}\n1\n{'q' * 160}\n{'1' * 31}\n{'q' * 160}\n{'1' * 30}\n")
    manifest = prepare("dm-mathematics", root, tmp_path / "out", modules=[MODULES[0]])
    assert documents(open_split(tmp_path / "out", "test")) == [(b"q" * 160 + b"\n", b"1" * 30)]
    assert manifest["passed_over"]["too_long"] == 2


BAD_LINES = [
    (b"a question\n", "line 1: a question without an answer"),
    (b"q\n1\nq2\n", "line 3: a question without an answer"),
    (b"q\n\nq2\n2\n", "line 2 is empty"),
    (b"q\n1\n \nq2\n", "line 3 is empty"),
    (b"q\n1\nq\xff\n2\n", "line 3 is no UTF-8 .byte 0xff"),
    (b"q\n" + b"1" * 70_000 + b"\n", "line 2 is longer than 65536 bytes"),
]


@pytest.mark.parametrize(("text", "message"), BAD_LINES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("folder", ["interpolate", "train-hard"])
def test_bad_lines_are_named_by_file_and_line(
    tmp_path: Path, text: bytes, message: str, packed: bool, folder: str
) -> None:
    source = write_archive(tmp_path / "in", questions=80)
    path = source / "mathematics_dataset-v1.0" / folder / f"{MODULES[0]}.txt"
    path.write_bytes(text)
    if packed:
        source = pack_archive(source, tmp_path / "m.tar.gz")
    with pytest.raises(ValueError, match=message) as caught:
        prepare("dm-mathematics", source, tmp_path / "out")
    assert f"{folder}/{MODULES[0]}.txt" in str(caught.value)
    assert "\n" not in str(caught.value)
    write_archive(tmp_path / "good")
    prepare("dm-mathematics", tmp_path / "good", tmp_path / "out")  # what the failure left is started over


def test_another_layout_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"has no interpolate/<module>\.txt; the layout read is"):
        prepare("dm-mathematics", tmp_path / "empty", tmp_path / "out")
    source = write_archive(tmp_path / "in", questions=80)
    with pytest.raises(ValueError, match=r"modules has 'algebra__linear', .* did you mean 'algebra__linear_1d'"):
        prepare("dm-mathematics", source, tmp_path / "out", modules=["algebra__linear"])
    (source / "mathematics_dataset-v1.0" / "train-medium" / f"{MODULES[1]}.txt").unlink()
    with pytest.raises(ValueError, match=f"has no train-medium/{MODULES[1]}.txt"):
        prepare("dm-mathematics", source, tmp_path / "out")


def member(name: str, **fields: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for key, value in fields.items():
        setattr(info, key, value)
    return info


UNSAFE = [
    member("../interpolate/evil.txt"),
    member("/interpolate/evil.txt"),
    member("a/../../interpolate/evil.txt"),
    member("interpolate/evil.txt", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    member("interpolate/evil.txt", type=tarfile.LNKTYPE, linkname="interpolate/other.txt"),
    member("interpolate/evil.txt", type=tarfile.CHRTYPE),
    member("interpolate/evil.txt", type=tarfile.FIFOTYPE),
]


@pytest.mark.parametrize("info", UNSAFE, ids=lambda info: f"{info.name}-{info.type.decode()}")
def test_unsafe_members_of_a_tarball_are_refused(tmp_path: Path, info: tarfile.TarInfo) -> None:
    with tarfile.open(tmp_path / "m.tar.gz", "w:gz") as archive:
        archive.addfile(info, io.BytesIO(b""))
    with pytest.raises(ValueError, match=r"m.tar.gz:.*evil.txt' is a link, a device or leads out"):
        prepare("dm-mathematics", tmp_path / "m.tar.gz", tmp_path / "out")


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    source = write_archive(tmp_path / "in", questions=80)
    (tmp_path / "outside.txt").write_text("q\n1\n")
    (source / "mathematics_dataset-v1.0" / "interpolate" / "evil.txt").symlink_to(tmp_path / "outside.txt")
    with pytest.raises(ValueError, match=r"evil.txt' is a link that leads out"):
        prepare("dm-mathematics", source, tmp_path / "out")


def _unpacked(data: bytes) -> bytes | None:
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error):
        return None


def test_a_damaged_tarball_is_refused(tmp_path: Path) -> None:
    packed = pack_archive(write_archive(tmp_path / "in", questions=80), tmp_path / "m.tar.gz")
    whole = packed.read_bytes()
    prepare("dm-mathematics", packed, tmp_path / "out", overwrite=True)
    step = len(whole) // 60
    flipped = [whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :] for at in range(40, len(whole), step)]
    # Some bits only choose between equal earlier texts to copy: such an archive is as good as before.
    changed = [data for data in flipped if _unpacked(data) != gzip.decompress(whole)]
    assert len(changed) > 50
    cut = [whole[:at] for at in range(0, len(whole), 4 * step)]
    for damaged in (*changed, *cut, b"no archive"):
        packed.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"source .*m\.tar\.gz") as caught:
            prepare("dm-mathematics", packed, tmp_path / "out", overwrite=True)
        assert "\n" not in str(caught.value)


def test_a_module_that_stands_twice_is_refused(archive: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "m.tar.gz", "w:gz") as packed:
        for _ in range(2):
            packed.add(archive / "mathematics_dataset-v1.0" / "interpolate", "interpolate")
    with pytest.raises(ValueError, match=f"holds interpolate/{MODULES[0]}.txt twice"):
        prepare("dm-mathematics", tmp_path / "m.tar.gz", tmp_path / "out")

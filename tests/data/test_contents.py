from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tangolm.cli import main
from tangolm.cli.folders import STYLES, _sample
from tangolm.data import mix, open_split, prepare, show
from tangolm.data.contents import lengths
from tests.data.test_text import many_files
from tests.data.tiny import prepare_sums


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    prepare_sums(tmp_path / "sums", rows=12, context=16)
    return tmp_path / "sums"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    many_files(tmp_path / "in")
    prepare("text", tmp_path / "in", tmp_path / "text", context=16)
    return tmp_path / "text"


def test_a_row_comes_in_pieces_with_the_supervised_part_marked(sums: Path) -> None:
    found = show(sums, "dev", row=3)
    assert found["sample"] == {
        "row": 3,
        "part": None,
        "pieces": [
            {"kind": "given", "tokens": 5, "text": "3+3=\n"},
            {"kind": "supervised", "tokens": 1, "text": "6"},
            {"kind": "end", "tokens": 1, "text": ""},
            {"kind": "padding", "tokens": 9, "text": ""},
        ],
    }
    assert show(sums, "dev", row=-9)["sample"] == found["sample"]
    for row in (12, -13):
        with pytest.raises(ValueError, match=f"row {row} is outside the 12 rows of the split 'dev'"):
            show(sums, "dev", row)


def test_lengths_are_those_of_the_documents_across_rows_and_shards(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = open_split(text, "train")
    sizes = [len(f"file number {number}\n") * 3 + 1 for number in range(120)]
    tokens = np.concatenate([split.row(row)[0] for row in range(split.rows)])
    for piece in (16, 64, 2**22):  # tokens looked at together do not show
        monkeypatch.setattr("tangolm.data.contents.PIECE", piece)
        found = lengths(split)
        assert found["documents"] == split.entry.documents
        assert found["tokens"] == split.entry.bytes + split.entry.documents
        assert (found["shortest"], found["longest"]) == (min(sizes), max(sizes))
        assert found["mean"] == found["tokens"] / found["documents"]
        assert [(entry["from"], entry["to"]) for entry in found["histogram"]] == [(32, 63)]
        assert found["histogram"][0]["documents"] == found["documents"]
    assert len(tokens) > found["tokens"]  # padding is no document


def test_the_histogram_counts_every_length(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for size in range(1, 41):
        (tmp_path / "in" / f"{size:02d}.txt").write_text(chr(64 + size) * size)
    prepare("text", tmp_path / "in", tmp_path / "out", context=8, dev_fraction=0.2, test_fraction=0.2)
    counted = {}
    for split in ("train", "dev", "test"):
        for entry in show(tmp_path / "out", split)["lengths"]["text"]["histogram"]:
            assert entry["to"] == 2 * entry["from"] - 1
            counted[entry["from"]] = counted.get(entry["from"], 0) + entry["documents"]
    assert counted == {2: 2, 4: 4, 8: 8, 16: 16, 32: 10}  # 2 to 41 tokens with the end token


def test_a_mixture_shows_every_part(sums: Path, text: Path, tmp_path: Path) -> None:
    mix([sums, text], tmp_path / "mixed")
    found = show(tmp_path / "mixed")
    assert found["manifest"]["dataset"] == "mixture"
    assert found["lengths"] == {"sums": lengths(open_split(sums, "train")), "text": lengths(open_split(text, "train"))}
    assert found["sample"]["part"] == "sums"
    assert found["sample"]["pieces"] == show(sums)["sample"]["pieces"]
    assert show(tmp_path / "mixed", row=12)["sample"]["pieces"] == show(text)["sample"]["pieces"]
    assert show(tmp_path / "mixed", row=-1)["sample"]["part"] == "text"


@pytest.mark.case(29)
def test_a_damaged_folder_is_named(sums: Path) -> None:
    shard = sums / "train-00001.tokens.npy"
    whole = shard.read_bytes()
    for content in (whole[:-1] + b"\xff", whole[:-2], b""):
        shard.write_bytes(content)
        with pytest.raises(ValueError, match=r"train-00001\.tokens\.npy' is damaged"):
            show(sums)
    shard.unlink()
    with pytest.raises(ValueError, match=r"train-00001\.tokens\.npy' is damaged: it is missing"):
        show(sums)
    with pytest.raises(ValueError, match=r"split 'tset' is not in the data .* did you mean 'test'"):
        show(sums, "tset")


def test_the_command_prints_marks_or_json(sums: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", str(sums), "--split", "test", "--row", "3"]) == 0
    out = capsys.readouterr().out
    assert "text: tokenizer bytes (257 ids), rows of 16 tokens" in out
    assert " test: 12 documents" in out
    assert "3+3=\n[+6+]<end><padding x 9>" in out
    assert main(["data", "show", str(sums), "--split", "test", "--row", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(show(sums, "test", 3)))


def test_the_command_cannot_be_made_to_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_bytes(b"before \x1b[2J\x07 [bold]after[/bold]\r\n\xff" + b"x" * 600)
    prepare("text", tmp_path / "a.txt", tmp_path / "out", context=512)
    assert main(["data", "show", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "before \\x1b[2J\\x07 [bold]after[/bold]\\r\n" in out
    assert "\x1b" not in out


def test_on_a_terminal_the_kinds_are_styles(sums: Path) -> None:
    shown = Console(force_terminal=True, color_system="standard", width=200, file=io.StringIO())
    text = _sample(show(sums, "test", 3)["sample"]["pieces"], shown)
    assert text.plain == "3+3=\n6<end><padding x 9>"
    styles = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert styles["6"] == STYLES["supervised"]
    assert len(set(styles.values())) == 4


def test_long_rows_are_cut_and_mixtures_are_made_by_command(
    tmp_path: Path, sums: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_bytes(b"word " * 9000)
    prepare("text", tmp_path / "a.txt", tmp_path / "long", context=8192)
    assert main(["data", "show", str(tmp_path / "long")]) == 0
    out = capsys.readouterr().out
    assert out.endswith("(the whole row is in --json)\n")
    assert len(out) < 6000
    many_files(tmp_path / "in")
    prepare("text", tmp_path / "in", tmp_path / "text", context=16)
    arguments = ["data", "mix", str(sums), str(tmp_path / "text"), "--out", str(tmp_path / "mixed")]
    assert main([*arguments, "--weights", "3,1"]) == 0
    out = capsys.readouterr().out
    assert "schedule weights:" in out
    assert "weight 3" in out
    assert main(["data", "show", str(tmp_path / "mixed")]) == 0
    assert "of the part sums" in capsys.readouterr().out
    assert main([*arguments, "--overwrite", "--weights", "3;1"]) == 2
    assert "weights '3;1' is no list of numbers" in capsys.readouterr().err
    assert main(["data", "shwo"]) == 2
    assert "did you mean 'show'" in capsys.readouterr().err

"""The page: every figure from the files, everything escaped, nothing loaded from elsewhere, sound HTML."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tangolm.report import write_report
from tests.report.conftest import HOSTILE

VOID = {"meta", "br", "hr", "img", "link", "input", "wbr"}


class Page(HTMLParser):
    """Reads a page strictly: every tag closed in order, ids unique; keeps text, tags and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"unclosed: {self.open}"
        ids = [value for _, name, value in self.attributes if name == "id"]
        assert len(ids) == len(set(ids))
        known = set(ids)
        for _, name, value in self.attributes:
            if name in ("aria-labelledby", "aria-describedby"):
                assert set(value.split()) <= known
            elif name in ("href", "xlink:href"):
                assert value.startswith("#")
                assert value[1:] in known

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data

    def flat(self) -> str:
        return re.sub(r"\s+", " ", self.text)


@pytest.fixture
def page(tmp_path: Path) -> Callable[..., Page]:
    def make(*runs: Path, title: str = "A title") -> Page:
        return Page(write_report(runs, tmp_path / "report.html", title).read_text(encoding="utf-8"))

    return make


def test_a_page_is_self_contained(make_run: Callable[..., Path], page: Callable[..., Page], tmp_path: Path) -> None:
    found = page(make_run("tango"), make_run("loop", "loop-mini-d4", nll=2.1))
    loading = {"script", "link", "img", "iframe", "object", "embed", "audio", "video", "base", "form", "image"}
    assert not loading & set(found.tags)
    assert not [item for item in found.attributes if item[1].startswith("on") or item[1] in ("src", "srcset", "action")]
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "@import" not in text
    for target in re.findall(r"url\(([^)]*)\)", text):
        assert target.startswith("#")
    namespaces = {value for _, name, value in found.attributes if name.startswith("xmlns")}
    assert set(re.findall(r"https?://[^\s\"'<)]*", text)) <= namespaces
    assert not list(tmp_path.glob(".tmp-*"))


def test_curves_are_inline_drawings_with_words(make_run: Callable[..., Path], page: Callable[..., Page]) -> None:
    found = page(make_run("tango"), make_run("loop", "loop-mini-d4", nll=2.1))
    assert found.tags["svg"] == 2
    assert found.tags["desc"] == 2
    assert sum(item == ("svg", "role", "img") for item in found.attributes) == 2
    assert "tango: lowest 2.000 at step 30" in found.text
    for label in ("nats per supervised token", "tokens trained on (millions, padding included)"):
        assert label in found.text
    styles = " ".join(value for _, name, value in found.attributes if name == "style")
    assert "var(--series-0)" in styles
    assert "var(--series-1)" in styles
    assert "fe0" not in styles  # no stand-in colour is left


def test_figures_come_from_the_files(make_run: Callable[..., Path], page: Callable[..., Page]) -> None:
    flat = page(make_run("tango"), make_run("loop", "loop-mini-d4", nll=2.1)).flat()
    for text in (
        "tango has the lowest test NLL, 2.000 nats a token: 0.100 below loop.",
        "1,234 tokens counted; checkpoint of step 30",
        "6 of 24; 95 % interval 12.0 to 44.9",
        "25.0 %",
        "12.5 %",
        "finished, 40 steps",
        "81,920",  # tokens
        "8,190",  # tokens/s
        "401,538",  # parameters of tango-mini
        "algebra__linear_1d",
        "One run a configuration",
        "not its official test",
        "model.architecture",
        "2.13.0",
        "tango/metrics.jsonl",
    ):
        assert text in flat, text
    assert "/nowhere" not in flat.replace("../nowhere", "")


def test_answers_at_the_baseline_are_called_so(make_run: Callable[..., Path], page: Callable[..., Page]) -> None:
    run = make_run()
    words = "No run answers clearly more questions"
    assert words in page(run).flat()  # 6 of 24, where the commonest answer gives 3
    path = run / "evaluation" / "answers.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "correct": 12, "accuracy": 0.5}))
    assert words not in page(run).flat()


def test_everything_is_escaped(make_run: Callable[..., Path], page: Callable[..., Page]) -> None:
    found = page(make_run('a<b>&"'), make_run("$x^2$", nll=3.0), title="<b>title</b> & more")
    assert found.tags["script"] == found.tags["b"] == 0
    for text in (f"Solve {HOSTILE} for x.", "<5>", "&7", "<b>title</b> & more", 'a<b>&"', "$x^2$"):
        assert text in found.text, text


def test_missing_parts_say_so(make_run: Callable[..., Path], page: Callable[..., Page]) -> None:
    whole, bare = make_run("whole"), make_run("bare", done=0, judged=False, environment=False)
    half = make_run("half", done=15, judged=False)
    flat = page(whole, bare, half).flat()
    assert "not begun" in flat
    assert "unfinished: step 15 of 40" in flat
    assert "Not finished: bare, half." in flat
    assert "at step 10, the last so far" in flat
    assert "not measured" in flat
    assert "lowest test NLL" not in flat
    assert "not where the runs found it" in flat
    alone = page(bare)
    assert "Curves: not measured." in alone.flat()
    assert "Environment: not measured." in alone.flat()
    assert alone.tags["svg"] == 0


def test_several_seeds_give_mean_and_deviation(make_run: Callable[..., Path], page: Callable[..., Page]) -> None:
    runs = [
        make_run(f"tango-{seed}", nll=nll, model_seed=seed, data_seed=order)
        for nll, seed, order in ((2.0, 17, 101), (2.1, 23, 103), (2.3, 41, 107))
    ]
    flat = page(*runs, make_run("loop", "loop-mini-d4")).flat()
    assert "17/101, 23/103, 41/107" in flat
    assert "2.133 ± 0.153 (n = 3)" in flat
    assert "One run a configuration" not in flat


def test_folders_that_are_no_runs_are_refused_by_name(make_run: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    with pytest.raises(ValueError, match="letters is not the folder of a run"):
        write_report([make_run(), tmp_path / "letters"], tmp_path / "report.html")
    with pytest.raises(ValueError, match="does not exist"):
        write_report([tmp_path / "absent"], tmp_path / "report.html")
    with pytest.raises(ValueError, match="runs is empty"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(ValueError, match="'run' is given twice"):
        write_report([tmp_path / "run", tmp_path / "run"], tmp_path / "report.html")
    (tmp_path / "run" / "evaluation" / "test.json").write_text("{")
    with pytest.raises(ValueError, match=r"test\.json is damaged"):
        write_report([tmp_path / "run"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_equal_names_are_told_apart(make_run: Callable[..., Path], page: Callable[..., Page]) -> None:
    flat = page(make_run("one/run"), make_run("two/run", nll=2.5)).flat()
    assert "one/run has the lowest test NLL" in flat


def test_the_same_runs_give_the_same_page(make_run: Callable[..., Path], tmp_path: Path) -> None:
    runs = [make_run("tango"), make_run("loop", "loop-mini-d4", nll=2.1)]
    pages = [write_report(runs, tmp_path / name).read_bytes() for name in ("a.html", "b.html")]
    assert pages[0] == pages[1]

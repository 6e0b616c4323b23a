from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangolm.data.lean_cut import cut, mask, unproven

# Statement, proof, and what follows the proof without being part of it.
CUTS: dict[str, tuple[str, str, str]] = {
    "by": ("theorem a : 1 = 1 ", ":= by\n  rfl", "\n"),
    "term": ("lemma a (n : ℕ) : n = n ", ":= rfl", "\n\ndef b := 1\n"),
    "next_theorem": ("theorem a : p ", ":= h", "\ndef theorem' := 1\n"),
    "module_header": ("theorem a : p ", ":= h", "\n\nend\n"),
    "bars": ("theorem a : ∀ n : ℕ, n = n\n  ", "| 0 => rfl\n  | n + 1 => rfl", "\n"),
    "bars_at_the_margin": ("theorem a : ∀ n : ℕ, n = n\n", "| 0 => rfl\n| _ + 1 => rfl", "\nsection\n"),
    "bars_without_space": ("theorem a : ∀ n : ℕ, n = n\n  ", "|0 => rfl\n  |_ + 1 => rfl", "\n"),
    "bar_on_the_line": ("theorem a : ¬ p 0 ", "| ⟨_, h⟩ => h rfl", "\n"),
    "where": ("theorem a : P ↔ Q ", "where\n  mp := f\n  mpr := g", "\n"),
    "where_all_default": ("theorem a : Nice C ", "where", "\n\n/-- next -/\ndef b := 1\n"),
    "absolute": ("theorem a : |x| ≤ |y + 1| ", ":= h", "\n"),
    "absolute_nested": ("theorem a :\n    |(|x| - |y|)| ≤ |x - y| ", ":= h", "\n"),
    "absolute_then_bars": ("theorem a : ∀ n, |f n| = 1\n  ", "| 0 => h\n  | _ + 1 => h", "\n"),
    "set_builder": ("theorem a : {x | p x} ⊆ { x : ℕ | q x } ", ":= h", "\n"),
    "divides": ("theorem a : 2 ∣ 4 ", ":= ⟨2, rfl⟩", "\n"),
    "conditional": ("theorem a : H[X | Y ; μ] ≤ ℙ[s | t] ", ":= h", "\n"),
    "operators": ("theorem a : (x || y) = y || x <|> z |> f <| w ||| v ", ":= h", "\n"),
    "let": ("theorem a : let b := 1; b = 1 ", ":= by\n  rfl", "\n"),
    "let_lines": ("theorem a :\n    let b := 1\n    let c : ℕ := 2\n    b < c ", ":= by\n  decide", "\n"),
    "have": ("theorem a : have h := foo; P h ", ":= rfl", "\n"),
    "do": ("theorem a : do let b ← c; d b = e ", ":= rfl", "\n"),
    "default": ("theorem a (h : p := by simp) [q := r] {s : t := u} : v ", ":= h", "\n"),
    "instance_braces": ("theorem a : f { x := 1, y := 2 } = {z with x := 1} ", ":= rfl", "\n"),
    "floor_as_an_operator": ("theorem a : x⌊d = ⌊|y|⌋ ", ":= rfl", "\n"),
    "fun_bars": ("theorem a : f fun | 0 => 1 | _ => 2 ", ":= rfl", "\n"),
    "match": ("theorem a : match x with | 0 => p | _ + 1 => q ", ":= by\n  cases x", "\n"),
    "matches": ("theorem a : x matches some _ | none ", ":= rfl", "\n"),
    "anonymous_constructor": ("theorem a : (⟨x, fun y => y⟩ : P) = ⦃z⦄ ", ":= rfl", "\n"),
    "string_in_statement": ('theorem a : f ":= | where" = ")" ', ":= rfl", "\n"),
    "string_escapes": (r'theorem a : f "\" := \\" = g ', ":= rfl", "\n"),
    "raw_string": ('theorem a : f r#"a " := "# = r"\\" ', ":= rfl", "\n"),
    "interpolated": ('theorem a : f s!"{g "}" \'"\'} := \\{" ', ':= m!"{s!"{x}"}"', "\n"),
    "characters": (r"theorem a : f '\"' '\'' '\n' '\x41' '\u03bb' '(' = g ", ":= rfl", "\n"),
    "plain_quote_character": ("theorem a : f '\"' = g ", ":= rfl", '\n-- "\n'),
    "primes": ("theorem a' (h' : f'' '' s = f ⁻¹' t) : x' = y'' ", ":= h'", "\n"),
    "french": ("theorem «a := b | where» : «c (» ", ":= rfl", "\n"),
    "universes": ("theorem a.{u, v} (α : Type u) : P.{v} α ", ":= rfl", "\n"),
    "unicode": ("theorem α₁.β' {𝕜 : Type*} (hε : ε ≠ 0) : ∃ δ > 0, ‖δ‖₊ < ε ", ":= h", "\n"),
    "comment_in_statement": ("theorem a -- := x\n    (h : p) /- := /- | -/ where -/ : q ", ":= h", "\n"),
    "comment_in_proof": (
        "theorem a : p ",
        ":= by -- sorry\n  /- sorry -/\n  simp",
        " -- done\n\n-- theorem b : q := h\n",
    ),
    "documentation": ("/-- Says `theorem` and /- := -/ more. -/\ntheorem a : p ", ":= h", "\n/-! ## theorem -/\n"),
    "documentation_on_the_line": ("/-- Short. -/ theorem a : p ", ":= h", "\n/-- Next. -/ def b := 1\n"),
    "attributes": ("@[simp, to_additive (attr := simp) foo]\ntheorem a : p ", ":= h", "\n@[simp] def b := 1\n"),
    "attribute_lines": ('@[to_additive /-- d -/,\n  deprecated "x" (since := "1")] lemma a : p ', ":= h", "\n"),
    "modifiers": ("@[simp] private nonrec protected theorem a : p ", ":= h", "\n"),
    "public": ("public theorem a : p ", ":= h", "\npublic section\n"),
    "open_in": ("open Foo Bar in\ntheorem a : p ", ":= h", "\n"),
    "prefixes": ("set_option x true in\nopen A in\nvariable (b) in\n/-- d -/\n@[simp] theorem a : p ", ":= h", "\n"),
    "open_in_on_the_line": ("open A in theorem a : p ", ":= by\n  simp", "\nopen B\n"),
    "prefix_over_lines": ("omit [A b]\n  [C d] in\nlemma a : p ", ":= h", "\n"),
    "guard": ("#guard_msgs in\ntheorem a : p ", ":= h", "\n#eval 1\n"),
    "indented": ("  theorem a : p ", ":= by\n    simp", "\n  def b := 1\n"),
    "proof_at_the_margin": ("theorem a : p ", ":= by\nsimp\nring", "\ndef b := 1\n"),
    "term_at_the_margin": ("theorem a : p ", ":=\nfoo bar", "\nend A\n"),
    "statement_at_the_margin": ("theorem a\n(h : p) :\nq ", ":= h", "\n"),
    "calc": ("theorem a : b = d ", ":=\ncalc b = c := h\n_ = d := g", "\n\ninstance : E := e\n"),
    "termination": ("theorem a : p ", ":= by\n  f\ntermination_by n\ndecreasing_by simp", "\nvariable (n)\n"),
    "local_definitions": ("theorem a : p ", ":= b\nwhere\n  b := h", "\n"),
    "unknown_command": ("theorem a : p ", ":= by\n  simp", "\n\nmy_own_command foo := 1\n"),
    "open_in_the_proof": ("theorem a : p ", ":= by\n  open A in\n  set_option x 1 in simp", "\n"),
    "crlf": ("theorem a :\r\n    p ", ":= by\r\n  simp", "\r\n\r\nend\r\n"),
}
HEADERS = {
    "none": "",
    "module": "/-\nCopyright\n-/\nmodule\n\npublic import A\n\n@[expose] public section\n\nnamespace A\n\n",
    "mutual": "mutual\n\n",
    "definition": 'def f : String := "theorem x : y := z"\n\n',
}


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("name", CUTS)
def test_each_form_is_cut_where_its_proof_begins_and_ends(name: str, header: str) -> None:
    statement, proof, rest = CUTS[name]
    text = HEADERS[header] + statement + proof + rest
    found = cut(text)
    assert not found.not_cut
    assert [text[one.start : one.cut] for one in found.theorems] == [statement.lstrip()]
    assert [text[one.cut : one.stop] for one in found.theorems] == [proof]
    assert not found.theorems[0].sorry


def test_all_forms_in_one_file_are_found_in_order() -> None:
    text = "\n\n".join(statement + proof + rest for statement, proof, rest in CUTS.values())
    found = cut(text)
    assert [(text[one.start : one.cut], text[one.cut : one.stop]) for one in found.theorems] == [
        (statement.lstrip(), proof) for statement, proof, _ in CUTS.values()
    ]
    assert found.searched + 3 == len(CUTS)  # the plain search wants no more than modifiers before the word on its line


NO_THEOREM = [
    "-- theorem a : p := h\n",
    "/-\ntheorem a : p := h\n-/\n",
    '/-- "\ntheorem a : p := h\n" -/\ndef b := 1\n',
    'def b := "\ntheorem a : p := h\n"\n',
    "def theoremList := lemma.b\n",
    "def a := foo theorem' (lemma := 1)\n",
    "macro `(command| theorem $x : p := h)\n",
    "proof_wanted a : p\n",
    "",
]


@pytest.mark.parametrize("text", NO_THEOREM)
def test_what_is_no_theorem_is_not_taken_for_one(text: str) -> None:
    found = cut(text)
    assert (found.theorems, found.not_cut, found.searched) == ((), (), 0)
    assert found.hidden == text.count("\ntheorem")


def test_what_has_no_proof_is_not_cut_and_the_next_theorem_is() -> None:
    text = "theorem a : p\n\ntheorem b : q := h\n\nlemma c :=\n\nlemma d : let x := 1 := h\n\ndef e := 1\n"
    found = cut(text)
    assert [text[place : place + 9] for place in found.not_cut] == ["theorem a", "lemma c :"]
    assert [text[one.start : one.stop] for one in found.theorems] == ["theorem b : q := h", "lemma d : let x := 1 := h"]
    assert found.searched == 4


SORRY = [
    ("theorem a : p := by sorry", True),
    ("theorem a : p := by\n  · admit", True),
    ("theorem a : p (by sorry) := h", True),
    ("theorem a : p := (sorry)", True),
    ("theorem a : p := by -- sorry\n  simp", False),
    ("theorem a : p := /- admit -/ h", False),
    ('theorem a : p := f "sorry"', False),
    ("theorem a : p := sorry'", False),
    ("theorem a : p := sorryAx.admit", False),
    ("theorem a : p := Foo.sorry", False),
]


@pytest.mark.parametrize(("text", "expected"), SORRY)
def test_sorry_is_a_word_of_code(text: str, expected: bool) -> None:
    assert [one.sorry for one in cut(text).theorems] == [expected]
    assert cut(text).sorry == unproven(text) == expected
    both = cut(text + "\n\ntheorem b : q := h\n\ndef c := sorry\n")
    assert [one.sorry for one in both.theorems] == [expected, False]
    assert both.sorry


PARTS = [
    "theorem ", "lemma ", "a ", ": ", ":= ", "| ", "|", "=> ", "where\n", "by\n", "  ", "\n", "\n\n", "\r\n", "(", ")", "{", "}",
    "[", "]", "⟨", "⟩", "/-", "-/", "/--", "-- ", '"', 's!"', 'r#"', '"#', "'", "'\"'", "\\", "«", "»", "@[", "in\n", "open A ",
    "let ", "have ", "fun ", "match ", "with ", "sorry ", "private ", "def b := 1\n", "x", "\x01", "end\n", "#eval ", "←", "𝕜",
]  # fmt: skip
texts: st.SearchStrategy[str] = st.lists(st.sampled_from(PARTS), max_size=60).map("".join) | st.text(max_size=80)


@given(texts)
def test_any_text_is_cut_without_loss(text: str) -> None:
    masked = mask(text)
    assert len(masked) == len(text)
    assert [at for at, one in enumerate(masked) if one == "\n"] == [at for at, one in enumerate(text) if one == "\n"]
    found, reached = cut(text), 0
    for one in found.theorems:
        assert reached <= one.start <= one.keyword < one.cut < one.stop <= len(text)
        assert text[one.keyword :].startswith(("theorem", "lemma"))
        assert text[one.cut :].startswith((":=", "|", "where"))
        assert text[one.start : one.cut] + text[one.cut : one.stop] == text[one.start : one.stop]
        reached = one.stop
    cut_or_not = {one.keyword for one in found.theorems} | set(found.not_cut)
    assert len(cut_or_not) == len(found.theorems) + len(found.not_cut) >= found.searched


LONG: dict[str, Callable[[int], str]] = {
    "quotes": lambda size: '"\\' * size,
    "interpolation": lambda size: 's!"{' * size,
    "comments": lambda size: "/-" * size,
    "brackets": lambda size: "theorem a : " + "(" * size,
    "attributes": lambda size: "@[" * size + "]" * size + "theorem a : p := h",
    "theorems": lambda size: "theorem a : p := h\n" * (size // 4),
    "spaces": lambda size: "theorem a : p :=" + " \n" * size,
}


@pytest.mark.parametrize("name", LONG)
def test_long_texts_take_no_more_than_their_share_of_time(name: str) -> None:
    text = LONG[name](40_000)
    start = time.process_time()
    cut(text)
    assert time.process_time() - start < 5  # some hundredths of a second; minutes where time grows with the square

"""Lean 4 source text cut into theorems, and each theorem into statement and proof. Lean itself is not needed.

A statement ends at the first `:=`, `|` or `where` outside of brackets that belongs to no term within it (`let`, `match`,
`fun |`, an absolute value). The proof is the rest, up to the next command. Any Lean file may extend the grammar, so this
rests on how people write it: a command begins a line, no further right than the declaration before it.

Texts are masked first: comments, strings and character literals are replaced by as many characters without a meaning, so
that a place in the mask is the same place in the text.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass

DOC = "\x01"  # stands in the mask where a documentation comment begins: it is part of the declaration behind it

_MODIFIERS = "private|protected|noncomputable|nonrec|public|meta|local|scoped|partial|unsafe|irreducible"
_COMMANDS = (
    "theorem|lemma|def|abbrev|example|instance|axiom|opaque|structure|class|inductive|coinductive|mutual|end|namespace|"
    "section|import|module|prelude|export|initialize|builtin_initialize|notation|notation3|infix|infixl|infixr|prefix|"
    "postfix|macro|macro_rules|syntax|declare_syntax_cat|elab|elab_rules|simproc|run_cmd|alias|add_decl_doc|"
    f"irreducible_def|proof_wanted|library_note|open|set_option|omit|include|variable|attribute|universe|{_MODIFIERS}"
)
# Words that go on with a declaration where they begin a line.
_GO_ON = (
    "where|termination_by|decreasing_by|deriving|with|by|from|then|else|at|using|fun|λ|show|have|let|suffices|calc|case|"
    "next|exact|refine|do|if|match|in|generalizing"
)
_PAIRS = "()[]{}⟨⟩⦃⦄⟦⟧⟪⟫‹›⟮⟯"


def _word(words: str) -> str:
    return "(?:" + "|".join(rf"{word}(?<![\w.'!?«»`]{word})" for word in words.split("|")) + r")(?![\w'!?])"


# What is no code. Possessive quantifiers keep it linear, and each alternative begins with a literal, which is found faster.
_PLAIN = r'"(?:[^"\\]++|\\.)*+"?'
_RAW = r"""r(?<![\w.']r)(\#*+)".*?"\1"""
_CHARACTER = r"""'(?<![\w'!?∘»]')(?:[^\\'\n]|\\(?:x[\da-fA-F]{2}|u[\da-fA-F]{4}|[^xu\n]))'"""
_INTERPOLATED = r'"(?<=\w!")'  # its first quote
_OPAQUE = re.compile(rf"--[^\n]*+|/-|{_INTERPOLATED}|{_PLAIN}|{_RAW}|{_CHARACTER}|«[^»\n]*+»", re.DOTALL)
_BLOCK_EDGE = re.compile(r"/-|-/")
_TEXT_EDGE = re.compile(r'["{]|\\.', re.DOTALL)  # within an interpolated string
_CODE_EDGE = re.compile(  # within its braces
    rf"{{|}}|--[^\n]*+|/-|{_INTERPOLATED}|{_PLAIN}|{_RAW}|{_CHARACTER}", re.DOTALL
)

_KEYWORD = re.compile(_word("theorem|lemma"))
_SORRY = re.compile(_word("sorry|admit"))
_LINE = re.compile(
    rf"^[ \t]*+(?:@\[[^\]\n]*+\][ \t]*+)*+(?:(?:{_MODIFIERS})[ \t]++)*+(?=(?:theorem|lemma)\s)", re.MULTILINE
)
_LAST_WORD = re.compile(r"(?<![\w.])[a-z]+\Z")
_COMMAND_MARK = rf"@\[|\#\w|{DOC}"
_ANY_COMMAND = re.compile(rf"^([ \t]*+)(?:{_COMMAND_MARK}|(?!(?:{_GO_ON})(?![\w'!?]))[^\W\d_]|«)", re.MULTILINE)
_KNOWN_COMMAND = re.compile(rf"^([ \t]*+)(?:{_COMMAND_MARK}|{_word(_COMMANDS)})", re.MULTILINE)
_EDGE = re.compile(
    rf"[{re.escape(_PAIRS)}]|:=|←|<-|<\|>|\|\|\|?|\|>|<\||\||" + _word("where|let|letI|have|haveI|match|matches|fun|λ")
)
_ALTERNATIVE = re.compile(r"\|[^|\n]*?=>")
_HEAD = re.compile(r"(?::=\s*+(?:by\b\s*+)?|\||where\b)\s*+")


@dataclass(frozen=True)
class Theorem:
    """A theorem or lemma: `text[start:cut]` is its statement and `text[cut:stop]` its proof, `:=`, `|` or `where` included.

    `keyword` is the place of its `theorem` or `lemma`; `sorry` says whether either part leaves something unproven.
    """

    start: int
    keyword: int
    cut: int
    stop: int
    sorry: bool


@dataclass(frozen=True)
class Cut:
    """What `cut` found in a text.

    Attributes:
        theorems: in order; they do not overlap.
        not_cut: the places of `theorem` and `lemma` that could not be cut.
        searched: how many theorems a plain search of lines finds outside of comments and strings.
        hidden: how many lines it finds within them.
        sorry: whether anything in the text is left unproven.
    """

    theorems: tuple[Theorem, ...]
    not_cut: tuple[int, ...]
    searched: int
    hidden: int
    sorry: bool


def cut(text: str) -> Cut:
    """Cut a Lean source text into its theorems; any text is accepted."""
    masked = mask(text)
    any_command, known_command = _Commands(_ANY_COMMAND, masked), _Commands(_KNOWN_COMMAND, masked)
    sorry = _SORRY.search(masked) is not None
    theorems, failed, reached = [], set(), 0
    for match in _KEYWORD.finditer(masked):
        keyword = match.start()
        start = _start(masked, keyword, any_command)
        if start is None or keyword < reached:
            continue
        column = start - masked.rfind("\n", 0, start) - 1
        end = _statement_end(masked, match.end(), known_command.behind(match.end(), column))
        if end is None:
            failed.add(keyword)
            continue
        head = _HEAD.match(masked, end)
        assert head is not None
        # A proof that begins on a line no further right than its theorem is told from a command by the command's name.
        line = masked.rfind("\n", end, head.end())
        low = line >= 0 and head.end() - line - 1 <= column
        stop = (known_command if low else any_command).behind(end + 1, column)
        stop = end + len(masked[end:stop].rstrip())
        if masked[end] != "w" and stop <= end + len(head.group().rstrip()):
            failed.add(keyword)  # nothing behind `:=`; a structure's fields may all have defaults
            continue
        theorems.append(Theorem(start, keyword, end, stop, sorry and _SORRY.search(masked, start, stop) is not None))
        reached = stop
    lines = [match.end() for match in _LINE.finditer(text)]
    seen = {place for place in lines if masked[place] == text[place]}
    found = {theorem.keyword for theorem in theorems}
    not_cut = tuple(sorted((failed | seen) - found))
    return Cut(tuple(theorems), not_cut, len(seen), len(lines) - len(seen), sorry)


def unproven(text: str) -> bool:
    """Whether `sorry` or `admit` stands in a text outside of comments and strings."""
    return ("sorry" in text or "admit" in text) and _SORRY.search(mask(text)) is not None


def mask(text: str) -> str:
    """`text` with comments as spaces (documentation as `DOC` and spaces), strings as `"`, `«names»` as `_`; lines stay."""
    pieces, done, position = [], 0, 0
    while (match := _OPAQUE.search(text, position)) is not None:
        start, position, token = match.start(), match.end(), match.group()
        if token == "/-":
            position = _block_end(text, position)
        elif token == '"':
            position = _interpolated_end(text, position)
        fill = " " if token[0] in "-/" else "_" if token[0] == "«" else '"'
        blank = "\n".join(fill * len(line) for line in text[start:position].split("\n"))
        if text.startswith("/--", start):
            blank = DOC + blank[1:]
        pieces += [text[done:start], blank]
        done = position
    return "".join([*pieces, text[done:]])


def _block_end(text: str, position: int) -> int:
    """Behind the end of a block comment, others within it included, whose `/-` ends at `position`."""
    depth = 1
    for edge in _BLOCK_EDGE.finditer(text, position):
        depth += 1 if edge.group() == "/-" else -1
        if depth == 0:
            return edge.end()
    return len(text)


def _interpolated_end(text: str, position: int) -> int:
    """Behind the end of an interpolated string whose first quote ends at `position`; its braces hold code, and that strings."""
    braces = [0]  # of each string that is open, the outermost first: how many braces are open within it
    while braces:
        match = (_CODE_EDGE if braces[-1] else _TEXT_EDGE).search(text, position)
        if match is None:
            return len(text)
        position, edge = match.end(), match.group()
        if edge == "{":
            braces[-1] += 1
        elif edge == "}":
            braces[-1] -= 1
        elif not braces[-1]:
            if edge == '"':
                braces.pop()
        elif edge == "/-":
            position = _block_end(text, position)
        elif edge == '"':
            braces.append(0)
    return position


class _Commands:
    """The lines of a mask that begin with a command, each with its place and column."""

    def __init__(self, pattern: re.Pattern[str], masked: str) -> None:
        margins = [match.span(1) for match in pattern.finditer(masked)]
        self._places = [start for start, _ in margins]
        self._columns = [end - start for start, end in margins]
        self._length = len(masked)

    def behind(self, position: int, column: int) -> int:
        """The first line from `position` on with a command at `column` or left of it; the length of the text if none."""
        for index in range(bisect_left(self._places, position), len(self._places)):
            if self._columns[index] <= column:
                return self._places[index]
        return self._length

    def before(self, position: int, column: int) -> int | None:
        """The command (not its line) at `column` or left of it on the last such line that begins before `position`."""
        for index in range(bisect_left(self._places, position) - 1, -1, -1):
            if self._columns[index] <= column:
                return self._places[index] + self._columns[index]
        return None


def _start(masked: str, keyword: int, commands: _Commands) -> int | None:
    """Where the declaration of `keyword` begins: its documentation, attributes, modifiers and `open .. in` included.

    None if anything else stands before it on its line: the word is then no command.
    """
    line = masked.rfind("\n", 0, keyword) + 1
    column = len(masked[line:keyword]) - len(masked[line:keyword].lstrip())
    place, start = keyword, None
    while True:
        if not masked[masked.rfind("\n", 0, place) + 1 : place].strip():
            start = place
        end = place
        while end and masked[end - 1].isspace():
            end -= 1
        if not end:
            return start
        if masked[end - 1] == DOC:
            before: int | None = end - 1
        elif masked[end - 1] == "]":
            before = _attribute(masked, end)
        else:
            word = _LAST_WORD.search(masked, max(0, end - 20), end)
            if word is None:
                return start
            before = commands.before(end, column) if word.group() == "in" else None
            if word.group() in _MODIFIERS.split("|"):
                before = word.start()
        if before is None:
            return start
        place = before


def _attribute(masked: str, end: int) -> int | None:
    """The place of the `@[` whose `]` ends at `end`; None if that bracket is another."""
    depth = 0
    for place in range(end - 1, 0, -1):
        depth += (masked[place] == "]") - (masked[place] == "[")
        if depth == 0:
            return place - 1 if masked[place - 1] == "@" else None
    return None


def _statement_end(masked: str, start: int, stop: int) -> int | None:
    """The place of the `:=`, `|` or `where` that ends the statement in `masked[start:stop]`."""
    depth = bindings = 0  # open brackets; `let` and `have` whose `:=` is still to come
    absolute = alternatives = False  # whether `|x` waits for its second bar; whether bars belong to a `match`
    for edge in _EDGE.finditer(masked, start, stop):
        token, place = edge.group(), edge.start()
        if token in _PAIRS:
            depth = max(0, depth + (1 if _PAIRS.index(token) % 2 == 0 else -1))
        elif depth:
            continue
        elif token in (":=", "←", "<-"):
            if token == ":=" and not bindings:
                return place
            bindings = max(0, bindings - 1)
        elif token == "where":
            return place
        elif token in ("let", "letI", "have", "haveI"):
            bindings += 1
        elif token in ("match", "matches") or (token in ("fun", "λ") and masked[edge.end() : stop].lstrip()[:1] == "|"):
            alternatives = True
        elif token == "|" and not alternatives:
            after_space = masked[place - 1].isspace()
            if absolute and not after_space:
                absolute = False
            elif not masked[place + 1 : place + 2].isspace() and not _begins_alternative(masked, place):
                absolute = True
            elif after_space and not bindings and masked.find("=>", place, stop) >= 0:
                return place
    return None


def _begins_alternative(masked: str, place: int) -> bool:
    """Whether the bar at `place`, with no space behind it, begins an alternative as `|0 => ..` at the start of a line."""
    line = masked.rfind("\n", 0, place) + 1
    return not masked[line:place].strip() and _ALTERNATIVE.match(masked, place) is not None

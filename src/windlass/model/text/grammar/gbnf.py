"""GBNF, the syntax of llama.cpp, to Lark as llguidance takes it. Word by word and without recursion, for grammars are strangers' input.

https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from windlass.foreign import shown
from windlass.model.text.grammar.compile import bad_constraint

MAX_PARENTHESES = 100
"""One in the other."""
MAX_WORDS = 100_000
MAX_COUNT_DIGITS = 6
_RULE = re.compile(r"^[ \t\r]*+[A-Za-z][\w-]*+[ \t]*+::=", re.MULTILINE)
_WORD = re.compile(
    r"""(?P<space>[ \t\r]++|\#[^\n]*+)
    |(?P<line>\n)
    |(?P<text>"(?:[^"\\]|\\.)*+")
    |(?P<set>\[(?:[^\]\\]|\\.)*+\])
    |(?P<name>[\w-]++)
    |(?P<begin>::=)
    |(?P<count>\{\s*+\d++\s*+(?:,\s*+\d*+\s*+)?\})
    |(?P<mark>[|().*+?])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"""\\(?:(?P<plain>["\\\[\]nrt])|x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|)""")
_IN_SET = re.compile(r"\\.|[\[/&~\n\r]", re.DOTALL)
_CONTROL = {"n": "\n", "r": "\r", "t": "\t"}
_CAMEL = re.compile(r"([a-z])([A-Z])")


def is_gbnf(text: str) -> bool:
    return _RULE.search(text) is not None


def lark_of(text: str) -> str:
    """BadInput: it is none."""
    rules = _Reader(text).rules()
    if "root" not in rules:
        _refuse("it has no rule named root")
    terminals = _terminals(rules)
    names = {name: _lark_name(name, name in terminals) for name in rules}
    if len(set(names.values())) < len(names):
        _refuse("names of rules differ only in case, - or _")
    lines = (f"{names[name]}: {' '.join(rule.words(names))}" for name, rule in rules.items())
    return "%llguidance {}\n\n" + "\n".join(lines) + "\n"


@dataclass
class _Rule:
    parts: list[str] = field(default_factory=list[str])
    """In Lark; of a reference its quantifier only."""
    references: dict[int, str] = field(default_factory=dict[int, str])
    """By their place among the parts."""

    def words(self, names: dict[str, str]) -> Iterator[str]:
        return (names[self.references[at]] + part if at in self.references else part for at, part in enumerate(self.parts))


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._rules: dict[str, _Rule] = {}
        self._name = ""
        self._rule: _Rule | None = None
        self._open = 0
        """Parentheses."""
        self._before = ""
        """The kind of word before: `atom`, `quantified`, or the mark after which a sequence begins."""

    def rules(self) -> dict[str, _Rule]:
        for kind, word in _words(self._text):
            if kind == "line":
                self._line()
            elif self._rule is None:
                self._head(kind, word)
            else:
                self._body(self._rule, kind, word)
        if not self._open:
            self._end()
        if self._name:
            _refuse(f"the rule {shown(self._name, 40)} does not end")
        for rule in self._rules.values():
            for name in rule.references.values():
                if name not in self._rules:
                    _refuse(f"there is no rule {shown(name, 40)}")
        return self._rules

    def _line(self) -> None:
        """It ends a rule, except in parentheses and after a mark."""
        if not self._open and self._before not in ("::=", "|"):
            self._end()

    def _end(self) -> None:
        if self._rule is not None:
            self._end_sequence(self._rule)
            self._rules[self._name] = self._rule
            self._name, self._rule = "", None

    def _head(self, kind: str, word: str) -> None:
        if kind == "name" and not self._name:
            self._name = word
        elif kind == "begin" and self._name:
            self._rule, self._before = _Rule(), word
        else:
            _refuse(f"a rule begins with its name and ::=, not with {shown(word, 40)}")

    def _body(self, rule: _Rule, kind: str, word: str) -> None:
        if kind == "count" or word in ("*", "+", "?"):
            self._quantify(rule, word)
        elif kind in ("text", "set", "name") or word == ".":
            self._atom(rule, kind, word)
        elif word == "(":
            self._open += 1
            if self._open > MAX_PARENTHESES:
                _refuse(f"parentheses are nested more than {MAX_PARENTHESES} deep")
            self._put(rule, "(", "(")
        elif word == "|" or (word == ")" and self._open):
            self._end_sequence(rule)
            self._open -= word == ")"
            self._put(rule, word, "atom" if word == ")" else "|")
        else:
            _refuse(f"{shown(word, 40)} is not expected in the rule {shown(self._name, 40)}")

    def _atom(self, rule: _Rule, kind: str, word: str) -> None:
        if kind == "name":
            rule.references[len(rule.parts)] = word
        made = {"text": _text, "set": _set}.get(kind)
        self._put(rule, made(word) if made is not None else "" if kind == "name" else "/./", "atom")

    def _quantify(self, rule: _Rule, word: str) -> None:
        if self._before != "atom":
            _refuse(f"{shown(word, 40)} has nothing before it in the rule {shown(self._name, 40)}")
        rule.parts[-1] += _count(word) if word[0] == "{" else word
        self._before = "quantified"

    def _end_sequence(self, rule: _Rule) -> None:
        """An empty one has to be written."""
        if self._before in ("::=", "|", "("):
            self._put(rule, '""', "atom")

    def _put(self, rule: _Rule, part: str, kind: str) -> None:
        rule.parts.append(part)
        self._before = kind


def _words(text: str) -> Iterator[tuple[str, str]]:
    at = num_words = 0
    while at < len(text):
        found = _WORD.match(text, at)
        num_words += 1
        if num_words > MAX_WORDS:
            _refuse(f"it has more than {MAX_WORDS:,} words, marks and spaces")
        if found is None or found.lastgroup is None:
            _refuse(f"it cannot be read from {shown(text[at : at + 40], 40)} on")
        at = found.end()
        if found.lastgroup != "space":
            yield found.lastgroup, found[0]


def _text(word: str) -> str:
    return json.dumps(_ESCAPE.sub(_character, word[1:-1]), ensure_ascii=False)


def _character(escape: re.Match[str]) -> str:
    if escape["plain"]:
        return _CONTROL.get(escape["plain"], escape["plain"])
    number = int(escape["x"] or escape["u"] or escape["U"] or "0", 16)
    if escape[0] == "\\" or number > 0x10FFFF or 0xD800 <= number < 0xE000:
        _refuse("a text or a set has \\ before what cannot be escaped")
    return chr(number)


def _set(word: str) -> str:
    """A class of characters as a regular expression between slashes has it."""
    return f"/[{_IN_SET.sub(_in_set, word[1:-1])}]/"


def _in_set(found: re.Match[str]) -> str:
    mark = found[0]
    if mark[0] != "\\":
        return {"\n": r"\n", "\r": r"\r"}.get(mark, f"\\{mark}")
    return mark if mark[1] in 'xuU"\\[]nrt' else _refuse("a set has \\ before what cannot be escaped")


def _count(word: str) -> str:
    least, comma, most = (part.strip() for part in word[1:-1].partition(","))
    if max(len(least), len(most)) > MAX_COUNT_DIGITS:
        _refuse(f"it repeats something {shown(word, 40)} times")
    return f"{{{least},{most if comma else least}}}"


def _terminals(rules: dict[str, _Rule]) -> set[str]:
    """Rules that lead to no other but terminals."""
    missing = {name: set(rule.references.values()) for name, rule in rules.items() if name != "root"}
    users: dict[str, list[str]] = {}
    for name, needed in missing.items():
        for other in needed:
            users.setdefault(other, []).append(name)
    found, waiting = set[str](), [name for name, needed in missing.items() if not needed]
    while waiting:
        found.add(name := waiting.pop())
        for user in users.get(name, ()):
            missing[user].discard(name)
            waiting += [] if missing[user] else [user]
    return found


def _lark_name(name: str, is_terminal: bool) -> str:
    if name == "root":
        return "start"
    joined = _CAMEL.sub(r"\1_\2", name.replace("-", "_"))
    return joined.upper() if is_terminal else joined.lower()


def _refuse(why: str) -> NoReturn:
    raise bad_constraint(f"the GBNF grammar is invalid: {why}")

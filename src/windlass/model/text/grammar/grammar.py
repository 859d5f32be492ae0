"""Builds grammars in llguidance's syntax. Text only: the engine compiles it. Text that is a special token in the vocabulary is
written as that token.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from json.encoder import encode_basestring
from typing import Any, cast

from windlass.core.request import Constraint
from windlass.foreign import shown
from windlass.model.text.grammar.compile import bad_constraint
from windlass.model.text.grammar.gbnf import is_gbnf, lark_of
from windlass.model.text.grammar.limits import check_lark, check_length, check_regex
from windlass.model.text.grammar.room import Room
from windlass.model.text.grammar.schema import EnforceableSchema, enforceable, enforceable_text

_JSON_SPACE = r"\r?\n[ \t]{0,32}|[ \t]{1,4}"
"""Whitespace allowed in JSON: a newline with indentation, or a few spaces. With unlimited whitespace some models write nothing else."""
_SPACE = r"/[ \n\r\t]{1,8}/"
MAX_CHOICES = MAX_TEXTS = 50_000
ANYTHING = "/(?s:.*)/"


class Grammar:
    """Collects rules; its methods return the expression that refers to a part."""

    def __init__(self, special: Mapping[str, int] | None = None) -> None:
        """`special`: special tokens -> ids."""
        self._special = dict(special or {})
        self._marks = re.compile(f"({'|'.join(map(re.escape, self._special))})") if self._special else None
        self._rules: dict[str, None] = {}
        """In order."""
        self._parts: list[dict[str, Any]] = []
        self._room, self._room_apart = Room(), Room()
        self._num_texts = 0

    def built(self, start: str) -> str:
        rules = "\n".join([f"start: {start}", *self._rules])
        return json.dumps({"grammars": [{"lark_grammar": rules + "\n"}, *self._parts]})

    def literal(self, text: str) -> str:
        self._num_texts += 1
        if self._num_texts > MAX_TEXTS:
            raise bad_constraint(f"the tools have more than {MAX_TEXTS:,} names and values; leave some out")
        found = [self._piece(piece) for piece in self._pieces(text) if piece]
        return " ".join(found) or '""'

    def space(self) -> str:
        """Optional whitespace, limited in length."""
        return self.rule(_SPACE, "space") + "?"

    def until(self, end: str) -> str:
        """Any text up to and including `end`."""
        if end in self._special:
            return self.rule(f"{ANYTHING} {self._piece(end)}")
        return self.rule(ANYTHING, options=f"[suffix={_quoted(end)}]")

    def without(self, mark: str) -> str:
        """Non-empty text that does not contain `mark`."""
        if mark in self._special:
            return self.rule("/(?s:.+)/", "words")
        self.rule(f"/(?s:.+)/ & ~/(?s:.*){re.escape(mark)}(?s:.*)/", "WORDS")
        return "WORDS"

    def schema(self, schema: Any, is_strict: bool = True) -> str:
        """`is_strict`: a keyword that cannot be enforced is refused, not left out."""
        return self._schema(enforceable(schema, self._room), is_strict)

    def take(self, schema: Any) -> None:
        """One that is taken apart before a grammar is made of it. BadInput: it is too large, or nested too deeply."""
        self._room_apart.take(schema)

    def _schema(self, found: EnforceableSchema, is_strict: bool) -> str:
        if found.schema is False:
            raise bad_constraint("the JSON schema is false, which no output can match")
        if is_strict and found.left_out:
            raise bad_constraint(
                f"the strict JSON schema has {shown(found.left_out[0], 100)}, which cannot be enforced; leave it or `strict` out"
            )
        kept: Any = found.schema
        given = dict(cast(Mapping[str, Any], kept)) if isinstance(kept, Mapping) else dict[str, Any]()
        options = {"whitespace_pattern": _JSON_SPACE, "coerce_one_of": True}
        return self._part({"json_schema": {"x-guidance": options} | given})

    def constraint(self, constraint: Constraint) -> str:
        match constraint.kind:
            case "json_object":
                return self.schema({"type": "object"})
            case "json_schema":
                return self._schema(enforceable_text(constraint.value), constraint.is_strict)
            case "regex":
                check_regex(constraint.value)
                return self._part({"lark_grammar": f"start: /{_in_slashes(constraint.value)}/\n"})
            case "choice":
                return self._part({"lark_grammar": _one_of(constraint.choices)})
            case "grammar":
                return self._part({"lark_grammar": _checked(_lark(constraint.value))})

    def rule(self, expression: str, name: str = "", options: str = "") -> str:
        """Adds a rule and returns its name; an identical rule is reused."""
        chosen = name or f"rule_{len(self._rules)}"
        line = f"{chosen}{options}: {expression}"
        self._rules.setdefault(line)
        return chosen

    def _part(self, content: dict[str, Any]) -> str:
        name = f"part_{len(self._parts)}"
        self._parts.append({"name": name, **content})
        return f"@{name}"

    def _pieces(self, text: str) -> list[str]:
        return [text] if self._marks is None else self._marks.split(text)

    def _piece(self, text: str) -> str:
        number = self._special.get(text)
        return _quoted(text) if number is None else f"<[{number}]>"


def _checked(grammar: str) -> str:
    """JSON schemas in it are taken as they are, so what would cost too much cannot be left out."""
    room = Room()
    for schema in check_lark(grammar):
        costly = [name for name in enforceable(schema, room).left_out if name.rpartition(".")[2] in ("multipleOf", "pattern")]
        if costly:
            raise bad_constraint(
                f"the JSON schema in the grammar has {shown(costly[0], 100)}, which cannot be enforced; leave it out"
            )
    return grammar


def _one_of(texts: tuple[str, ...]) -> str:
    """One terminal with all alternatives; a terminal cannot be empty."""
    nonempty = list(dict.fromkeys(text for text in texts if text))
    if len(nonempty) > MAX_CHOICES:
        raise bad_constraint(f"there are more than {MAX_CHOICES:,} choices; leave some out")
    if not nonempty:
        return 'start: ""\n'
    return f"start: CHOICE{'?' if '' in texts else ''}\nCHOICE: {' | '.join(map(_quoted, nonempty))}\n"


def _lark(grammar: str) -> str:
    """Lark as it is; GBNF, the syntax of llama.cpp, is converted."""
    check_length(grammar)
    return lark_of(grammar) if is_gbnf(grammar) else grammar


def _quoted(text: str) -> str:
    return encode_basestring(text)


def _in_slashes(regex: str) -> str:
    """Escapes a regular expression for use between slashes on one line."""
    escaped = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], regex, flags=re.DOTALL)
    return escaped.replace("\\\n", "\n").replace("\n", r"\n").replace("\r", r"\r")

"""Builds grammars in llguidance's syntax. Text only: the engine compiles it. Text that is a special token in the vocabulary is
written as that token.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from windlass.core.request import Constraint
from windlass.errors import MissingExtra
from windlass.model.text.grammar.compile import bad_constraint
from windlass.model.text.grammar.limits import check_lark, check_regex
from windlass.model.text.grammar.schema import EnforceableSchema, enforceable, enforceable_text

_JSON_SPACE = r"\r?\n[ \t]{0,32}|[ \t]{1,4}"
"""Whitespace allowed in JSON: a newline with indentation, or a few spaces. With unlimited whitespace some models write nothing else."""
_SPACE = r"/[ \n\r\t]{1,8}/"
_GBNF = re.compile(r"^\s*[A-Za-z][\w-]*\s*::=", re.MULTILINE)
MAX_GBNF = 32_768
"""Characters: conversion is slow."""
ANYTHING = "/(?s:.*)/"


class Grammar:
    """Collects rules; its methods return the expression that refers to a part."""

    def __init__(self, special: Mapping[str, int] | None = None) -> None:
        """`special`: special tokens -> ids."""
        self._special = dict(special or {})
        self._rules: list[str] = []
        self._parts: list[dict[str, Any]] = []

    def built(self, start: str) -> str:
        rules = "\n".join([f"start: {start}", *self._rules])
        return json.dumps({"grammars": [{"lark_grammar": rules + "\n"}, *self._parts]})

    def literal(self, text: str) -> str:
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
        return self._schema(enforceable(schema), is_strict)

    def _schema(self, found: EnforceableSchema, is_strict: bool) -> str:
        if found.schema is False:
            raise bad_constraint("the JSON schema is false, which no output can match")
        if is_strict and found.left_out:
            raise bad_constraint(
                f"the strict JSON schema has {found.left_out[0][:100]}, which cannot be enforced; leave it or `strict` out"
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
        if line not in self._rules:
            self._rules.append(line)
        return chosen

    def _part(self, content: dict[str, Any]) -> str:
        name = f"part_{len(self._parts)}"
        self._parts.append({"name": name, **content})
        return f"@{name}"

    def _pieces(self, text: str) -> list[str]:
        if not self._special:
            return [text]
        return re.split(f"({'|'.join(map(re.escape, self._special))})", text)

    def _piece(self, text: str) -> str:
        number = self._special.get(text)
        return _quoted(text) if number is None else f"<[{number}]>"


def _checked(grammar: str) -> str:
    """JSON schemas in it are taken as they are, so what would cost too much cannot be left out."""
    for schema in check_lark(grammar):
        costly = [name for name in enforceable(schema).left_out if name.rpartition(".")[2] in ("multipleOf", "pattern")]
        if costly:
            raise bad_constraint(f"the JSON schema in the grammar has {costly[0][:100]}, which cannot be enforced; leave it out")
    return grammar


def _one_of(texts: tuple[str, ...]) -> str:
    """One terminal with all alternatives; a terminal cannot be empty."""
    nonempty = list(dict.fromkeys(text for text in texts if text))
    if not nonempty:
        return 'start: ""\n'
    return f"start: CHOICE{'?' if '' in texts else ''}\nCHOICE: {' | '.join(map(_quoted, nonempty))}\n"


def _lark(grammar: str) -> str:
    """Lark as it is; GBNF, the syntax of llama.cpp, is converted."""
    if _GBNF.search(grammar) is None:
        return grammar
    if len(grammar) > MAX_GBNF:
        raise bad_constraint(f"the GBNF grammar is longer than {MAX_GBNF:,} characters; write it in Lark syntax")
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark
    except ImportError:
        raise MissingExtra("llguidance", "serve", "a grammar in GBNF") from None
    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # noqa: BLE001 - of any kind, for text that is no grammar
        why = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise bad_constraint(f"the GBNF grammar is invalid: {why}") from None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _in_slashes(regex: str) -> str:
    """Escapes a regular expression for use between slashes on one line."""
    escaped = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], regex, flags=re.DOTALL)
    return escaped.replace("\\\n", "\n").replace("\n", r"\n").replace("\r", r"\r")

"""A look at a constraint before a library gets it: what would take it long, much memory or a deep stack. Pure, cheap, without recursion.

It judges by what was measured with llguidance 1.9 and knows nothing of its inside; so what passes is compiled in a process with limits all the
same (model/text/isolated).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from windlass.foreign import shown
from windlass.model.text.grammar.compile import bad_constraint
from windlass.model.text.grammar.room import MAX_NESTING

MAX_DEPTH = 400
"""Schemas and references, one within the other: a worker's stack of 4 MiB ends between 600 and 800."""
MAX_MULTIPLE = 10_000
"""States of a number's remainder: 25 ms. Their number is the divisor's without its factors 2 and 5, for which the last digits do."""
MAX_DIGITS, MAX_PLACES = 2**32, 20
"""Of a divisor, without its decimal point, and after it."""
MAX_QUANTIFIERS = 1_000
"""In one regular expression: up to 0.25 s; the time grows with their square."""
MAX_REGEX = 20_000
"""Characters."""
MAX_LARK = 512 * 1024
"""Characters of a grammar. Those of whole programming languages have 50,000."""
MAX_WORDS = 50_000
"""Names, texts, expressions and comments of a grammar. llguidance takes no more symbols than MAX_GRAMMAR_SIZE."""
MAX_RULES_DEEP = 500
"""Rules that lead to each other: a worker's stack ends between 1,000 and 2,000."""
MAX_TERMINAL = 10_000
"""Parts of a terminal with all that it refers to put in its place, as llguidance does."""


# --- JSON schemas


def check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise bad_constraint(f"the JSON schema leads more than {MAX_DEPTH} levels deep through its references; simplify it")


def is_costly_multiple(divisor: Any) -> bool:
    if not isinstance(divisor, (int, float)) or isinstance(divisor, bool) or not 0 < divisor < float("inf"):
        return False  # nonsense, which llguidance says
    if divisor >= MAX_DIGITS:
        return True
    _, digits, exponent = Decimal(repr(divisor)).as_tuple()
    if not isinstance(exponent, int) or exponent < -MAX_PLACES:
        return True
    states = int("".join(map(str, digits))) * 10 ** max(exponent, 0)
    if states >= MAX_DIGITS:
        return True
    for factor in (2, 5):
        while states % factor == 0:
            states //= factor
    return states > MAX_MULTIPLE


# --- regular expressions


def is_costly_regex(regex: str) -> bool:
    return len(regex) > MAX_REGEX or sum(map(regex.count, "?*+{")) > MAX_QUANTIFIERS


_OPAQUE = re.compile(r"\\.|\[(?:\\.|[^\]\\])*+\]?", re.DOTALL)
"""Escaped characters and classes."""
_INNER_ANCHOR = re.compile(r"(?<=[^(|^:)])\^|\$(?=[^)|$])")


def has_inner_anchor(regex: str) -> bool:
    """`^` after something, or `$` before something, for which a grammar would have to look around."""
    return ("^" in regex or "$" in regex) and _INNER_ANCHOR.search(_OPAQUE.sub("a", regex)) is not None


def check_regex(regex: str) -> None:
    if is_costly_regex(regex):
        raise bad_constraint(
            f"the regular expression is longer than {MAX_REGEX:,} characters or has more than {MAX_QUANTIFIERS:,} of ? * + {{; simplify it"
        )


# --- grammars in Lark's syntax

_PARTS = re.compile(
    r"""//[^\n]*+|\#[^\n]*+  # comments
    |"(?:\\.|[^"\\\n])*+(?:"i?)?  # text, and what of it is not closed
    |(?P<regex>/(?:\\.|[^/\\\n])++(?:/[a-z]*+)?)
    |(?P<json>%json\s*+(?=\{))
    |(?:(?<=\n)|\A)[ \t]*+[!?]?(?P<rule>\w++)(?:\[[^\]\n]*+\])?(?:\.-?\d++)?[ \t]*+(?:\{[^\n}]*+\}[ \t]*+)?:  # a rule begins
    |(?P<name>[A-Za-z_]\w*+)|[?*+]""",
    re.VERBOSE,
)
"""Nothing in it is tried twice: a quantifier gives nothing back."""


_JSON = json.JSONDecoder()


def check_lark(grammar: str) -> list[Any]:
    """The JSON schemas in it, which have limits of their own."""
    check_length(grammar)
    rules, schemas = _lark_rules(grammar)
    terminals = {name for name in rules if name.upper() == name}
    depths, sizes = dict[str, int](), dict[str, int]()
    for name in _innermost_first(rules):
        inner = [other for other in rules[name] if other in depths]
        depths[name] = 1 + max((depths[other] for other in inner), default=0)
        sizes[name] = len(rules[name]) + sum(min(sizes[other], MAX_TERMINAL + 1) for other in inner if other in terminals)
        if depths[name] > MAX_RULES_DEEP:
            raise bad_constraint(f"the grammar's rules lead to each other more than {MAX_RULES_DEEP} deep; simplify it")
        if name in terminals and sizes[name] > MAX_TERMINAL:
            raise bad_constraint(
                f"the grammar's terminal {name[:40]!r} has more than {MAX_TERMINAL:,} parts; simplify it, or make it a rule"
            )
    return schemas


def check_length(grammar: str) -> None:
    if len(grammar) > MAX_LARK:
        raise bad_constraint(f"the grammar is longer than {MAX_LARK:,} characters; simplify it")


def _lark_rules(grammar: str) -> tuple[dict[str, list[str]], list[Any]]:
    """Rules -> their parts, names of others among them; and JSON schemas."""
    rules: dict[str, list[str]] = {"": []}
    schemas: list[Any] = []
    at, current = 0, rules[""]
    num_words = 0
    while (found := _PARTS.search(grammar, at)) is not None:
        at, num_words = found.end(), num_words + 1
        if num_words > MAX_WORDS:
            raise bad_constraint(f"the grammar has more than {MAX_WORDS:,} words and marks; simplify it")
        if found["rule"]:
            current = rules.setdefault(found["rule"], [])
        elif found["json"]:
            schema, at = _json_at(grammar, at)
            schemas.append(schema)
        elif found["regex"]:
            check_regex(found["regex"])
        if (found["rule"] is None and found[0][0] not in "#/") or found["regex"]:
            current.append(found["name"] or "")
    return rules, schemas


def _json_at(text: str, start: int) -> tuple[Any, int]:
    try:
        return _JSON.raw_decode(text, start)
    except RecursionError:
        raise bad_constraint(f"the JSON schema is nested more than {MAX_NESTING} levels deep; simplify it") from None
    except ValueError as error:
        raise bad_constraint(f"a JSON schema in the grammar is no JSON: {shown(error)}") from None


def _innermost_first(rules: Mapping[str, list[str]]) -> Iterator[str]:
    """Every rule, after those that it refers to unless they refer to it too."""
    seen = set[str]()
    for start in rules:
        waiting = [(start, iter(rules[start]))] if start not in seen else []
        seen.add(start)
        while waiting:
            name, inner = waiting[-1]
            following = next((other for other in inner if other in rules and other not in seen), None)
            if following is None:
                waiting.pop()
                yield name
            else:
                seen.add(following)
                waiting.append((following, iter(rules[following])))

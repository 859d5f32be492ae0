"""What the form of an answer may be constrained to."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from windlass.core.model import Frozen
from windlass.errors import BadInput

MAX_CHARACTERS = 2 * 2**20
"""Of the value: the largest JSON schemas that are published have 1.5 million."""
ConstraintKind = Literal["json_object", "json_schema", "regex", "grammar", "choice"]


class Constraint(Frozen):
    """Constrains the whole answer; reasoning before it is free."""

    kind: ConstraintKind
    value: str = ""
    """A JSON schema, a regular expression, a grammar in Lark or GBNF syntax, or a JSON list of strings; empty for `json_object`."""
    is_strict: bool = True
    """Rejects a JSON schema with keywords that cannot be enforced token by token; otherwise the rest of it is enforced."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(ConstraintKind):
            raise _bad(f"unknown constraint kind {self.kind!r}; use {', '.join(get_args(ConstraintKind))}")
        if (self.kind == "json_object") != (not self.value):
            needs = "takes no value" if self.kind == "json_object" else "needs a value"
            raise _bad(f"a constraint of kind {self.kind} {needs}")
        if len(self.value) > MAX_CHARACTERS:
            raise _bad(f"the constraint has {len(self.value):,} characters; at most {MAX_CHARACTERS:,} are taken")
        if self.kind == "choice" and not self.choices:
            raise _bad("a constraint of kind choice needs at least one string")
        if self.kind == "json_schema" and not isinstance(_json(self.value, "the JSON schema"), (dict, bool)):
            raise _bad("a JSON schema should be an object (or true or false)")

    @property
    def choices(self) -> tuple[str, ...]:
        """Of kind `choice`."""
        found = _json(self.value, "the list of choices")
        try:
            return msgspec.convert(found, tuple[str, ...])
        except msgspec.ValidationError:
            raise _bad("the value of a constraint of kind choice should be a JSON list of strings") from None


def _bad(message: str) -> BadInput:
    return BadInput(message, field="constraint")


def _json(text: str, what: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise _bad(f"{what} is not valid JSON: {error}") from None
    except RecursionError:
        raise _bad(f"{what} is nested too deeply") from None

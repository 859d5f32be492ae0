"""How much of a request's schemas is looked at, and for how long. What is larger is refused before anything else goes through it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from windlass.model.text.grammar.compile import bad_constraint

MAX_NESTING = 100
"""Of JSON: llguidance's reader takes 128 levels, and some are ours."""
MAX_VALUES = 50_000
"""The largest of 1,449 real schemas has 44,500. A look takes one or two microseconds for each."""
MAX_CHARACTERS = 2 * 2**20
"""In keys and texts; 1,300,000 in the largest real one."""
PER_SCHEMA = 25
"""What the look at a schema costs beside its values, in values."""


class Room:
    """For all schemas of one request together."""

    def __init__(self) -> None:
        self._values, self._characters = MAX_VALUES, MAX_CHARACTERS

    def take(self, schema: Any) -> None:
        """BadInput: there is no room for it, or it is nested too deeply."""
        self._values -= PER_SCHEMA
        level: list[Any] = [schema]
        for _ in range(MAX_NESTING):
            level = [inner for item in level for inner in self._within(item)]
            if not level:
                return
        raise bad_constraint(f"the JSON schema is nested more than {MAX_NESTING} levels deep; simplify it")

    def _within(self, value: Any) -> Iterable[Any]:
        """Objects and lists in one."""
        if not isinstance(value, (Mapping, list)):
            return ()
        given = cast("Mapping[str, Any] | list[Any]", value)
        self._values -= len(given)
        if self._values < 0:
            raise bad_constraint(f"JSON schemas with more than {MAX_VALUES:,} values are not taken; simplify them")
        values = given
        if isinstance(given, Mapping):
            self._characters -= sum(map(len, given))
            values = given.values()
        self._characters -= sum([len(item) for item in values if isinstance(item, str)])
        if self._characters < 0:
            raise bad_constraint(f"JSON schemas with more than {MAX_CHARACTERS:,} characters are not taken; simplify them")
        return [item for item in values if isinstance(item, (dict, list))]


class OutOfWork(Exception):
    """More would be needed than is given."""


class Work:
    """A count of steps, so that work on strangers' input ends."""

    def __init__(self, most: int) -> None:
        self.most, self.done = most, 0

    def spend(self, steps: int) -> None:
        """Before they are taken."""
        self.done += steps
        if self.done > self.most:
            raise OutOfWork

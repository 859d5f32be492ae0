"""JSON values as texts that can be compared: 1 and 1.0 are the same, 1 and true are not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

from windlass.model.text.grammar.room import Work

CHARACTERS_PER_STEP = 64


class Values:
    """Each list is written once. Everything that is given must stay as long as this does: it is known by its id."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self._texts: dict[int, str] = {}
        self._sets: dict[int, frozenset[str]] = {}

    def text(self, value: Any) -> str:
        if isinstance(value, (list, dict)):
            return self._text_of(cast(object, value))
        self.work.spend(1 + (len(value) // CHARACTERS_PER_STEP if isinstance(value, str) else 0))
        return text_of(value)

    def all_of(self, values: list[Any]) -> frozenset[str]:
        """Of an `enum`."""
        found = self._sets.get(id(values))
        if found is None:
            self.work.spend(len(values))
            found = self._sets[id(values)] = frozenset(map(self.text, values))
        return found

    def allowed(self, schemas: Iterable[Mapping[str, Any]]) -> frozenset[str] | None:
        """By the `const` and `enum` of all of them; None: any."""
        found: frozenset[str] | None = None
        for schema in schemas:
            sets = [frozenset((self.text(schema["const"]),))] if "const" in schema else []
            sets += [self.all_of(cast(list[Any], schema["enum"]))] if isinstance(schema.get("enum"), list) else []
            for values in sets:
                self.work.spend(min(len(values), len(values if found is None else found)))
                found = values if found is None else found & values
        return found

    def _text_of(self, value: object) -> str:
        found = self._texts.get(id(value))
        if found is None:
            found = self._texts[id(value)] = text_of(value)
            self.work.spend(len(found) // CHARACTERS_PER_STEP)
        self.work.spend(1)
        return found


def text_of(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    elif isinstance(value, (list, dict)):
        value = json.loads(json.dumps(value), parse_float=_number)
    return json.dumps(value, sort_keys=True)


def _number(text: str) -> float | int:
    return int(value) if (value := float(text)).is_integer() else value

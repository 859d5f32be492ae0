"""`$ref` within one JSON Schema: what it leads to."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, cast
from urllib.parse import unquote

from windlass.foreign import shown
from windlass.model.text.grammar.compile import bad_constraint

MAX_NAME, MAX_PATH = 64, 256
"""Characters of a name that a message has, and of the names around it."""
MAX_FOLLOWED = 50_000
"""Parts of all pointers."""
MAX_PARTS = 8
"""Of a relative address that is found by its end."""
MAX_INDEX = 9
"""Digits."""
_STANDARD = "//json-schema.org/draft"
Way = tuple["str | int", ...]
"""From one schema to one in it: `("properties", "tags")`."""


class Place(NamedTuple):
    """Its name is put together when it is asked for: siblings may be many, and the names around them long."""

    schema: dict[str, Any]
    document: dict[str, Any]
    """Of which `#/...` is a part: the nearest schema around it that has an `$id`, or the root."""
    depth: int = 0
    """Schemas and references on the way from the root."""
    outer: Place | None = None
    """None: the root."""
    way: Way = ()

    def within(self, way: Way, schema: dict[str, Any]) -> Place:
        return Place(schema, schema if _id(schema) else self.document, self.depth + 1, self, way)

    @property
    def path(self) -> str:
        """`properties.tags`; empty: the root."""
        ways, place = list[Way](), self
        while place.outer is not None:
            ways.append(place.way)
            place = place.outer
        return shown("".join(_step(part) for way in reversed(ways) for part in way)[1:], MAX_PATH)


class References:
    def __init__(self, root: dict[str, Any]) -> None:
        self.root = Place(root, root)
        self.is_bundle = False
        """A schema was met that belongs to another document than the root."""
        self._left = MAX_FOLLOWED
        self._found: dict[tuple[int, str], Place | None] = {}
        """By the document and the reference."""

    def target(self, reference: Any) -> dict[str, Any] | None:
        """None too if it depends on where the reference is: a schema in this one has an `$id`."""
        found = None if self.is_bundle else self._find(reference, self.root.schema)
        return None if found is None else found.schema

    def place(self, of: Place) -> Place | None:
        """What the `$ref` of a schema leads to; None: nothing, or it cannot be found here."""
        found = self._find(of.schema.get("$ref"), of.document)
        return None if found is None else found._replace(depth=of.depth + 1)

    def is_foreign(self, reference: str) -> bool:
        """It leads to another document, which is not there; or to JSON Schema's own, of which llguidance has a copy that it cannot enforce."""
        address = reference.partition("#")[0]
        return bool(address) and (_STANDARD in address or self._addressed(address) is None)

    def _find(self, reference: Any, document: dict[str, Any]) -> Place | None:
        if not isinstance(reference, str):
            return None
        key = id(document), reference
        if key not in self._found:
            self._found[key] = self._followed(reference, document)
        return self._found[key]

    def _followed(self, reference: str, document: dict[str, Any]) -> Place | None:
        address, _, fragment = reference.partition("#")
        if fragment and not fragment.startswith("/"):
            return self._names.get(f"#{fragment}")
        if not address:
            start = self.root if document is self.root.schema else self._documents.get(id(document), self.root)
        else:
            start = self._addressed(address)
        if start is None:
            return None
        self._left -= fragment.count("/")
        if self._left < 0:
            raise bad_constraint(f"the references of the JSON schema have more than {MAX_FOLLOWED:,} parts; simplify it")
        return _followed(start, fragment)

    def _addressed(self, address: str) -> Place | None:
        """Addresses may be relative: `item.json` is `https://example.org/schemas/item.json`."""
        return self._names.get(address) or self._ends.get(address.lstrip("./"))

    @cached_property
    def _documents(self) -> dict[int, Place]:
        return {id(place.schema): place for place in self._names.values()}

    @cached_property
    def _ends(self) -> dict[str, Place]:
        """By the end of an `$id`, from any of its last slashes on."""
        found = dict[str, Place]()
        for name, place in self._names.items():
            if name[:1] != "#":
                for end in islice(_ends(name), MAX_PARTS):
                    found.setdefault(end, place)
        return found

    @cached_property
    def _names(self) -> dict[str, Place]:
        """By `$id` or `#anchor`. Looked for anywhere: one in a wrong place costs nothing."""
        named, waiting = dict[str, Place](), [self.root]
        while waiting:
            place = waiting.pop()
            for key in ("$id", "id", "$anchor"):
                name = place.schema.get(key)
                if isinstance(name, str):
                    named.setdefault(f"#{name}" if key == "$anchor" else name if name[:1] == "#" else name.rstrip("#"), place)
            waiting += _objects(place)
        return named


def _step(part: str | int) -> str:
    return f"[{part}]" if isinstance(part, int) else f".{shown(part, MAX_NAME)}"


def _id(schema: dict[str, Any]) -> str:
    found = schema.get("$id", schema.get("id"))
    return found if isinstance(found, str) and not found.startswith("#") else ""


def _ends(name: str) -> Iterator[str]:
    at = len(name)
    while (at := name.rfind("/", 0, at)) >= 0:
        yield name[at + 1 :]


def _objects(place: Place) -> list[Place]:
    """Schemas or not."""
    found: list[Place] = []
    for key, value in place.schema.items():
        if isinstance(value, dict):
            found.append(place.within((key,), cast(dict[str, Any], value)))
        elif isinstance(value, list):
            items = enumerate(cast(list[Any], value))
            found += [place.within((key, number), cast(dict[str, Any], item)) for number, item in items if isinstance(item, dict)]
    return found


def _followed(start: Place, pointer: str) -> Place | None:
    """https://www.rfc-editor.org/rfc/rfc6901"""
    found: Any = start.schema
    place, way = start, list[str | int]()
    for part in pointer.split("/")[1:]:
        name = (unquote(part) if "%" in part else part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = cast(dict[str, Any], found)[name]
            way.append(name)
        elif isinstance(found, list) and _is_index(name) and int(name) < len(cast(list[Any], found)):
            found = cast(list[Any], found)[int(name)]
            way.append(int(name))
        else:
            return None
        if isinstance(found, dict):
            place, way = place.within(tuple(way), cast(dict[str, Any], found)), []
    return place if isinstance(found, dict) else None


def _is_index(name: str) -> bool:
    return name.isdecimal() and len(name) <= MAX_INDEX

"""`$ref` within one JSON Schema: what it leads to."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple, cast
from urllib.parse import unquote

_STANDARD = "//json-schema.org/draft"


class Place(NamedTuple):
    path: str
    """`properties.tags`; empty: the root."""
    schema: dict[str, Any]
    document: dict[str, Any]
    """Of which `#/...` is a part: the nearest schema around it that has an `$id`, or the root."""
    depth: int = 0
    """Schemas and references on the way from the root."""

    def within(self, where: str, schema: dict[str, Any]) -> Place:
        return Place(where, schema, schema if _id(schema) else self.document, self.depth + 1)


class References:
    def __init__(self, root: dict[str, Any]) -> None:
        self.root = Place("", root, root)
        self.is_bundle = False
        """A schema was met that belongs to another document than the root."""

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
        return bool(address) and (_STANDARD in address or not any(_is_same(address, name) for name in self._names))

    def _find(self, reference: Any, document: dict[str, Any]) -> Place | None:
        if not isinstance(reference, str):
            return None
        address, _, fragment = reference.partition("#")
        if fragment and not fragment.startswith("/"):
            return self._names.get(f"#{fragment}")
        if not address:
            start = self.root if document is self.root.schema else self._documents.get(id(document), self.root)
        else:
            start = next((place for name, place in self._names.items() if _is_same(address, name)), None)
        return None if start is None else _followed(start, fragment)

    @cached_property
    def _documents(self) -> dict[int, Place]:
        return {id(place.schema): place for place in self._names.values()}

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


def _id(schema: dict[str, Any]) -> str:
    found = schema.get("$id", schema.get("id"))
    return found if isinstance(found, str) and not found.startswith("#") else ""


def _objects(place: Place) -> list[Place]:
    """Schemas or not."""
    found: list[Place] = []
    for key, value in place.schema.items():
        where = f"{place.path}.{key}" if place.path else key
        if isinstance(value, dict):
            found.append(place.within(where, cast(dict[str, Any], value)))
        elif isinstance(value, list):
            items = enumerate(cast(list[Any], value))
            found += [
                place.within(f"{where}[{number}]", cast(dict[str, Any], item)) for number, item in items if isinstance(item, dict)
            ]
    return found


def _followed(start: Place, pointer: str) -> Place | None:
    """https://www.rfc-editor.org/rfc/rfc6901"""
    found: Any = start.schema
    place, path = start, start.path
    for part in pointer.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found, path = cast(dict[str, Any], found)[name], f"{path}.{name}" if path else name
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(cast(list[Any], found)):
            found, path = cast(list[Any], found)[int(name)], f"{path}[{name}]"
        else:
            return None
        if isinstance(found, dict):
            place = place.within(path, cast(dict[str, Any], found))
    return place if isinstance(found, dict) else None


def _is_same(address: str, name: str) -> bool:
    """Addresses may be relative: `item.json` is `https://example.org/schemas/item.json`."""
    return name[:1] != "#" and (address == name or name.endswith(f"/{address.lstrip('./')}"))

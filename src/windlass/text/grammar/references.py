"""`$ref` within one JSON Schema: what it leads to."""

from __future__ import annotations

from typing import Any, NamedTuple, cast
from urllib.parse import unquote


class Place(NamedTuple):
    path: str
    """`properties.tags`; empty: the root."""
    schema: dict[str, Any]
    depth: int
    """Schemas and references on the way from the root."""


class References:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._named: dict[str, Place] | None = None
        """By `$id` or `#anchor`; None: not looked for yet."""

    def target(self, reference: Any) -> dict[str, Any] | None:
        found = self._find(reference)
        return None if found is None else found.schema

    def place(self, of: Place) -> Place | None:
        """What the `$ref` of a schema leads to; None: nothing, or it cannot be found here."""
        found = self._find(of.schema.get("$ref"))
        return None if found is None else found._replace(depth=of.depth + 1)

    def is_foreign(self, reference: str) -> bool:
        """It leads to another document, which is not there."""
        address = reference.partition("#")[0]
        return bool(address) and not any(_is_same(address, name) for name in self._names())

    def _find(self, reference: Any) -> Place | None:
        if not isinstance(reference, str):
            return None
        address, _, fragment = reference.partition("#")
        if not address:
            start = Place("", self._root, 0)
        else:
            known = [place for name, place in self._names().items() if _is_same(address, name)]
            if not known:
                return None
            start = known[0]
        if fragment and not fragment.startswith("/"):
            return self._names().get(f"#{fragment}")
        return _followed(start, fragment)

    def _names(self) -> dict[str, Place]:
        """Looked for anywhere: an `$id` in a wrong place costs nothing."""
        if self._named is None:
            self._named, waiting = {}, [Place("", self._root, 0)]
            while waiting:
                place = waiting.pop()
                for key in ("$id", "id", "$anchor"):
                    name = place.schema.get(key)
                    if isinstance(name, str):
                        self._named.setdefault(
                            f"#{name}" if key == "$anchor" else name if name[:1] == "#" else name.rstrip("#"), place
                        )
                waiting += list(_objects(place))
        return self._named


def _objects(place: Place) -> list[Place]:
    """Schemas or not."""
    found: list[Place] = []
    for key, value in place.schema.items():
        where = f"{place.path}.{key}" if place.path else key
        items: list[Any] = cast(list[Any], value) if isinstance(value, list) else [value]
        found += [
            Place(f"{where}[{number}]" if isinstance(value, list) else where, cast(dict[str, Any], item), 0)
            for number, item in enumerate(items)
            if isinstance(item, dict)
        ]
    return found


def _followed(start: Place, pointer: str) -> Place | None:
    """https://www.rfc-editor.org/rfc/rfc6901"""
    found: Any = start.schema
    path = start.path
    for part in pointer.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found, path = cast(dict[str, Any], found)[name], f"{path}.{name}" if path else name
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(cast(list[Any], found)):
            found, path = cast(list[Any], found)[int(name)], f"{path}[{name}]"
        else:
            return None
    return Place(path, cast(dict[str, Any], found), 0) if isinstance(found, dict) else None


def _is_same(address: str, name: str) -> bool:
    """Addresses may be relative: `item.json` is `https://example.org/schemas/item.json`."""
    return name[:1] != "#" and (address == name or name.endswith(f"/{address.lstrip('./')}"))

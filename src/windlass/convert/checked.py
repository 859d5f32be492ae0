"""Is the source what its config says? Every expected tensor there, in its shape; nothing there that nobody asked for."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from windlass.convert.outputs import Output
from windlass.convert.readers import BUFFERS, Place, claimed, find_place
from windlass.core.ports import TensorStore
from windlass.core.rule import Part, stored_shape
from windlass.errors import BadCheckpoint


def placed(outputs: tuple[Output, ...], store: TensorStore, ignore_next_token: bool) -> dict[str, Place]:
    """Where each output is read. Stored copies of other tensors may be missing; anything else must be there."""
    names = frozenset(store.names())
    found: dict[str, Place] = {}
    used: set[str] = set()
    for output in outputs:
        place = find_place(output, names)
        if place is None:
            if output.rule.copy_of is None:
                raise BadCheckpoint("the checkpoint has no such tensor, which its config calls for", tensor=output.name)
            continue
        _check_shape(output, place, store)
        found[output.name] = place
        used |= claimed(place)
    _check_unclaimed(names - used, outputs, ignore_next_token)
    return found


def _check_shape(output: Output, place: Place, store: TensorStore) -> None:
    if place.source.encoding:
        return  # blocks have a shape of their own, checked as they are decoded
    expected = stored_shape(output.rule, place.source)
    actual = store.shape(place.name)
    if actual != expected and not (len(expected) == 1 and prod(actual) == expected[0]):
        raise BadCheckpoint(f"its shape is {list(actual)}, but the config calls for {list(expected)}", tensor=place.name)


def _check_unclaimed(names: frozenset[str] | set[str], outputs: tuple[Output, ...], ignore_next_token: bool) -> None:
    """What no rule names may be part of the mathematics, so it stops the conversion; buffers of old code do not."""
    layers = [output.layer for output in outputs if output.layer is not None and output.rule.part is Part.MAIN]
    extra = max(layers, default=-1) + 1
    unknown = sorted(name for name in names if not BUFFERS.fullmatch(name))
    if ignore_next_token:
        unknown = [name for name in unknown if f".{extra}." not in name]
    if unknown:
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise BadCheckpoint(
            f"no part of this kind of model{more}; the config and the weights do not belong together", tensor=unknown[0]
        )


def carried_blocks(blocks: Mapping[str, str], wanted_bits: int) -> dict[str, str]:
    """Those whose codes are already of the wanted width."""
    return {name: kind for name, kind in blocks.items() if {"Q4_0": 4, "Q8_0": 8}[kind] == wanted_bits}

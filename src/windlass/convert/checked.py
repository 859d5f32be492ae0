"""Is the source what its config says? Every expected tensor there, in its shape; nothing there that nobody asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

from windlass.convert.outputs import Output
from windlass.convert.readers import BUFFERS, Place, claimed, find_place
from windlass.core.ports import TensorStore
from windlass.core.rule import Part, stored_shape
from windlass.errors import BadCheckpoint

FLOATS = ("F32", "F16", "BF16", "F64")
MXFP4_INPUTS = 32
FP8_BLOCK = 128


def placed(outputs: tuple[Output, ...], store: TensorStore, ignore_next_token: bool) -> dict[str, Place]:
    """Where each output is read. Stored copies of other tensors may be missing; anything else must be there."""
    names = frozenset(store.names())
    found: dict[str, Place] = {}
    used: set[str] = set()
    for output in outputs:
        place = find_place(output, names)
        if place is None:
            if output.rule.copy_of is None:
                raise _missing(output, names)
            continue
        _check_stored(output, place, store)
        found[output.name] = place
        used |= claimed(place)
    _check_unclaimed(names - used, outputs, ignore_next_token)
    return found


def _missing(output: Output, names: frozenset[str]) -> BadCheckpoint:
    if f"{output.module}.weight_packed" in names:
        return BadCheckpoint("is packed already; convert the original weights", tensor=output.name)
    return BadCheckpoint("the checkpoint has no such tensor, which its config calls for", tensor=output.name)


def _check_stored(output: Output, place: Place, store: TensorStore) -> None:
    """Shapes and types, of scales and blocks too, so that nothing can go wrong later but the numbers themselves."""
    expected = stored_shape(output.rule, place.source)
    if place.source.encoding:
        *rows, inputs = expected
        _require(store, f"{place.name}_blocks", [(*rows, inputs // MXFP4_INPUTS, MXFP4_INPUTS // 2)], ("U8",))
        _require(store, f"{place.name}_scales", [(*rows, inputs // MXFP4_INPUTS)], ("U8",))
        return
    is_matrix = len(output.shape) == 2 and not place.source.transposed
    _require(store, place.name, [expected], (*FLOATS, "F8_E4M3") if is_matrix else FLOATS)
    if store.dtype(place.name) == "F8_E4M3":
        _check_scales(store, place.name, expected)


def _check_scales(store: TensorStore, name: str, shape: tuple[int, ...]) -> None:
    *experts, rows, inputs = shape
    names = store.names()
    if f"{name}_scale_inv" in names:
        blocks = (*experts, -(-rows // FP8_BLOCK), -(-inputs // FP8_BLOCK))
        if experts and rows % FP8_BLOCK:
            raise BadCheckpoint(f"stacked experts of {rows} rows share no whole blocks of {FP8_BLOCK}", tensor=name)
        _require(store, f"{name}_scale_inv", [blocks], (*FLOATS, "F8_E8M0"))
    elif f"{name}_scale" in names:
        _require(store, f"{name}_scale", [(*experts, rows, 1), (prod(experts) * rows,), (1,)], FLOATS)
    else:
        raise BadCheckpoint("stored in 8 bits without a scale beside it (_scale or _scale_inv)", tensor=name)


def _require(store: TensorStore, name: str, shapes: list[tuple[int, ...]], dtypes: tuple[str, ...]) -> None:
    """One of these shapes and types. Where a vector is called for, dimensions of one do not matter."""
    if name not in store.names():
        raise BadCheckpoint("the checkpoint has no such tensor, without which its blocks are no numbers", tensor=name)
    actual, dtype = store.shape(name), store.dtype(name)
    if not any(actual == shape or (len(shape) == 1 and prod(actual) == shape[0]) for shape in shapes):
        raise BadCheckpoint(f"its shape is {list(actual)}, but the config calls for {list(shapes[0])}", tensor=name)
    if dtype not in dtypes:
        raise BadCheckpoint(f"its type is {dtype}, where {', '.join(dtypes)} can be read", tensor=name)


def _check_unclaimed(names: frozenset[str] | set[str], outputs: tuple[Output, ...], ignore_next_token: bool) -> None:
    """What no rule names may be part of the mathematics, so it stops the conversion; buffers of old code do not."""
    layers = [output.layer for output in outputs if output.layer is not None and output.rule.part is Part.MAIN]
    extra = max(layers, default=-1) + 1
    unknown = sorted(name for name in names if not BUFFERS.fullmatch(name))
    if ignore_next_token:
        unknown = [name for name in unknown if not re.match(rf"\D*\.{extra}\.", name)]  # the first number is the layer's
    if unknown:
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise BadCheckpoint(
            f"no part of this kind of model{more}; the config and the weights do not belong together", tensor=unknown[0]
        )


def carried_blocks(blocks: Mapping[str, str], wanted_bits: int) -> dict[str, str]:
    """Those whose codes are already of the wanted width."""
    return {name: kind for name, kind in blocks.items() if {"Q4_0": 4, "Q8_0": 8}[kind] == wanted_bits}

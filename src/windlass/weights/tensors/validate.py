"""Is a checkpoint what its config says? Every tensor there, in its shape and type, and none that nobody asked for. Reads no row."""

from __future__ import annotations

import re
from collections.abc import Collection
from math import prod

from windlass.core.ports import TensorStore
from windlass.core.rule import ModelPart, Rule, stored_shape
from windlass.errors import BadCheckpoint
from windlass.weights.tensors.packed import check_packed
from windlass.weights.tensors.readers import BUFFERS, ModelTensor, TensorLocation, TensorToRead, locate_tensor, stored_names

FLOATS = ("F32", "F16", "BF16", "F64")
WITH_SCALES = ("F8_E4M3", "I8")
MXFP4_INPUTS = 32
FP8_BLOCK = 128


def locate_tensors(rules: tuple[Rule, ...], store: TensorStore, *, others_allowed: bool = False) -> dict[str, TensorLocation]:
    """Where each of our tensors lies, by our name. Stored copies of others may be missing, and the layer that guesses ahead.

    `others_allowed`: there may be tensors that no rule names (a state_dict has tied ones twice, and buffers).
    """
    names = frozenset(store.names())
    found: dict[str, TensorLocation] = {}
    used: set[str] = set()
    for rule in rules:
        for ours in tensors_of(rule):
            location = locate_tensor(ours, names)
            if location is not None:
                check_stored(ours, location, store)
                found[ours.name] = location
                used |= stored_names(location)
            elif rule.copy_of is None and rule.part is ModelPart.MAIN:
                raise missing_tensor(ours)
    if not others_allowed:
        check_unclaimed(names - used)
    return found


def tensors_of(rule: Rule) -> list[ModelTensor]:
    layers = rule.layers if rule.layers is not None else (None,)
    experts = range(rule.num_experts) if rule.num_experts else (None,)
    return [ModelTensor(rule=rule, layer=layer, expert=expert) for layer in layers for expert in experts]


def missing_tensor(ours: ModelTensor) -> BadCheckpoint:
    wanted = ours.rule.sources[0].name.format(layer=ours.layer, expert=ours.expert)
    return BadCheckpoint("missing from the checkpoint, although its config requires it", tensor=wanted)


def check_unclaimed(names: Collection[str], ignored: str = "") -> None:
    """What no rule names may be part of the mathematics; buffers of old code are not. `ignored`: a pattern that names begin with."""
    unknown = sorted(name for name in names if not BUFFERS.fullmatch(name) and not (ignored and re.match(ignored, name)))
    if unknown:
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise BadCheckpoint(
            f"no part of this kind of model{more}; the config and the weights do not belong together", tensor=unknown[0]
        )


def check_stored(wanted: TensorToRead, location: TensorLocation, store: TensorStore) -> None:
    """Shapes and types, of scales and blocks too, so that nothing can go wrong later but the numbers themselves."""
    expected = stored_shape(wanted.rule, location.source)
    if location.packed:
        check_packed(store, location.name, expected[::-1] if location.source.transposed else expected)
        return
    if location.source.encoding:
        *rows, inputs = expected
        _require(store, f"{location.name}_blocks", [(*rows, inputs // MXFP4_INPUTS, MXFP4_INPUTS // 2)], ("U8",))
        _require(store, f"{location.name}_scales", [(*rows, inputs // MXFP4_INPUTS)], ("U8",))
        return
    is_matrix = len(wanted.shape) == 2 and not location.transposed
    _require(store, location.name, [expected], (*FLOATS, *WITH_SCALES) if is_matrix else FLOATS)
    if store.dtype(location.name) in WITH_SCALES:
        _check_scales(store, location.name, expected)


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

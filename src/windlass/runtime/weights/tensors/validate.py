"""Checks a checkpoint against its config: every tensor is there with its shape and dtype, and no unknown one. Reads no weights."""

from __future__ import annotations

import re
from collections.abc import Collection
from math import prod

from windlass.core.constants import FP8_BLOCK, MXFP4_BLOCK
from windlass.core.ports import TensorStore
from windlass.core.rule import ModelPart, Rule, Source, stored_shape
from windlass.errors import BadCheckpoint
from windlass.runtime.weights.tensors.packed import check_packed
from windlass.runtime.weights.tensors.readers import (
    BUFFERS,
    Form,
    ModelTensor,
    TensorLocation,
    TensorToRead,
    layouts,
    locate_tensor,
    stored_form,
    stored_names,
)

FLOATS = ("F32", "F16", "BF16", "F64")
WITH_SCALES = ("F8_E4M3", "I8")


def locate_tensors(rules: tuple[Rule, ...], store: TensorStore, *, others_allowed: bool = False) -> dict[str, TensorLocation]:
    """Where each tensor is stored, by our name. Only stored copies and the MTP layer may be missing.

    `others_allowed`: ignore tensors that no rule names (a state_dict has tied weights twice, and buffers).
    """
    names = frozenset(store.names())
    found: dict[str, TensorLocation] = {}
    used: set[str] = set()
    for rule in rules:
        tried, valid = layouts(rule), set[tuple[Source, bool, Form]]()
        for ours in tensors_of(rule):
            location = locate_tensor(ours, names, tried)
            if location is not None:
                kind = location.source, location.packed, stored_form(store, names, location)
                if kind not in valid:  # experts are alike
                    check_stored(ours, location, store)
                    valid.add(kind)
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
    """Refuses tensors that no rule names, which may change the computation; known buffers are fine. `ignored`: regex for name prefixes."""
    unknown = sorted(name for name in names if not BUFFERS.fullmatch(name) and not (ignored and re.match(ignored, name)))
    if unknown:
        more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        raise BadCheckpoint(f"unexpected tensor for this architecture{more}; config and weights do not match", tensor=unknown[0])


def check_stored(wanted: TensorToRead, location: TensorLocation, store: TensorStore) -> None:
    """Shapes and dtypes, including scales and blocks, so that later only the values can be wrong."""
    expected = stored_shape(wanted.rule, location.source)
    if location.packed:
        check_packed(store, location.name, expected[::-1] if location.source.transposed else expected)
        return
    if location.source.encoding:
        *rows, inputs = expected
        _require(store, f"{location.name}_blocks", [(*rows, inputs // MXFP4_BLOCK, MXFP4_BLOCK // 2)], ("U8",))
        _require(store, f"{location.name}_scales", [(*rows, inputs // MXFP4_BLOCK)], ("U8",))
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
            raise BadCheckpoint(
                f"stacked experts of {rows} rows are not a multiple of the fp8 block size {FP8_BLOCK}", tensor=name
            )
        _require(store, f"{name}_scale_inv", [blocks], (*FLOATS, "F8_E8M0"))
    elif f"{name}_scale" in names:
        _require(store, f"{name}_scale", [(*experts, rows, 1), (prod(experts) * rows,), (1,)], FLOATS)
    else:
        raise BadCheckpoint("stored in 8 bits, but its scale (_scale or _scale_inv) is missing", tensor=name)


def _require(store: TensorStore, name: str, shapes: list[tuple[int, ...]], dtypes: tuple[str, ...]) -> None:
    """One of these shapes and dtypes; for vectors, dimensions of size one are ignored."""
    if name not in store.names():
        raise BadCheckpoint("missing from the checkpoint; the weight cannot be dequantized without it", tensor=name)
    actual, dtype = store.shape(name), store.dtype(name)
    if not any(actual == shape or (len(shape) == 1 and prod(actual) == shape[0]) for shape in shapes):
        raise BadCheckpoint(f"its shape is {list(actual)}, but the config requires {list(shapes[0])}", tensor=name)
    if dtype not in dtypes:
        raise BadCheckpoint(f"its dtype is {dtype}; supported: {', '.join(dtypes)}", tensor=name)

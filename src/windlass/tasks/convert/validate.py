"""Checks the source against its config: every expected tensor is there with its shape, and no unknown one."""

from __future__ import annotations

from collections.abc import Mapping

from windlass.core.ports import TensorStore
from windlass.core.rule import ModelPart
from windlass.errors import BadCheckpoint
from windlass.runtime.weights.tensors.readers import TensorLocation, locate_tensor, stored_names
from windlass.runtime.weights.tensors.validate import check_stored, check_unclaimed
from windlass.tasks.convert.outputs import ConvertedTensor


def locate_sources(
    outputs: tuple[ConvertedTensor, ...], store: TensorStore, ignore_next_token: bool
) -> dict[str, TensorLocation]:
    """Where each output is read from. Only stored copies of other tensors may be missing."""
    names = frozenset(store.names())
    found: dict[str, TensorLocation] = {}
    used: set[str] = set()
    for output in outputs:
        location = locate_tensor(output, names)
        if location is None:
            if output.rule.copy_of is None:
                raise BadCheckpoint("missing from the checkpoint, although its config requires it", tensor=output.name)
            continue
        check_stored(output, location, store)
        found[output.name] = location
        used |= stored_names(location)
    layers = [output.layer for output in outputs if output.layer is not None and output.rule.part is ModelPart.MAIN]
    extra = max(layers, default=-1) + 1  # the first number in a name is the layer
    check_unclaimed(names - used, rf"\D*\.{extra}\." if ignore_next_token else "")
    return found


def copyable_blocks(blocks: Mapping[str, str], wanted_bits: int) -> dict[str, str]:
    """Tensors already stored in blocks of the requested width, whose codes can be copied."""
    return {name: kind for name, kind in blocks.items() if {"Q4_0": 4, "Q8_0": 8}[kind] == wanted_bits}

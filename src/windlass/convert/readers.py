"""Rows of an output, wherever and however the source stores them: plain, transposed, stacked, fp8 or fp4 in blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from math import prod
from typing import TYPE_CHECKING

from windlass.convert.outputs import Output, published
from windlass.core.model import Frozen
from windlass.core.ports import TensorStore
from windlass.core.rule import Rows, Source

if TYPE_CHECKING:
    import torch

ReadRows = Callable[[int, int], "torch.Tensor"]
"""Rows start..stop of an output, [rows, in] (or elements of a vector), in the source's own type or float32."""

PREFIXES = ("transformer.", "model.")
"""Some files carry one of these before every name, some do not."""

# Buffers that older code saved with the weights; they hold nothing that was learnt.
BUFFERS = re.compile(
    r".*(rotary_emb\.inv_freq|\.attn\.(masked_)?bias|attention\.(masked_)?bias|\.attn\.masked_bias|position_ids)"
)
SCALES = ("_scale", "_scale_inv", "_blocks", "_scales")


class Place(Frozen):
    """Where an output lies: the stored name, and which of the rule's layouts it is in."""

    name: str
    source: Source
    stacked: bool


def spellings(name: str) -> list[str]:
    return [
        name,
        *(prefix + name for prefix in PREFIXES),
        *(name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)),
    ]


def find_place(output: Output, names: Collection[str]) -> Place | None:
    """The published layout first, then the others the rule knows."""
    usual = published(output.rule)
    for source in (usual, *(other for other in output.rule.sources if other != usual)):
        for name in spellings(source.name.format(layer=output.layer, expert=output.expert)):
            if (f"{name}_blocks" if source.encoding else name) in names:
                return Place(name=name, source=source, stacked=source.stacked)
    return None


def claimed(place: Place) -> set[str]:
    """Every stored tensor that belongs to a place: itself and its scales."""
    stem = place.name.removesuffix(".weight")
    return {place.name, *(f"{place.name}{suffix}" for suffix in SCALES), *(f"{stem}.weight{suffix}" for suffix in SCALES)}


def reader(store: TensorStore, output: Output, place: Place) -> ReadRows:
    if place.stacked and len(output.shape) == 1:
        return lambda start, stop: _vector(store, output, place, start, stop)
    base = _decoded(store, output, place)
    first, rows = _first_row(output, place), _picked(output, place)
    if place.source.transposed:
        return lambda start, stop: _columns(store, place.name, first, output, start, stop)
    if rows is None:
        return lambda start, stop: base(first + start, first + stop)
    return lambda start, stop: _interleaved(base, first, rows, start, stop)


def _vector(store: TensorStore, output: Output, place: Place, start: int, stop: int) -> torch.Tensor:
    """Vectors of all experts are stored as rows, and a store reads whole rows."""
    expert = output.expert or 0
    return store.read(place.name, expert, expert + 1)[0, start:stop]


def _first_row(output: Output, place: Place) -> int:
    """Row of the flattened stored tensor where this expert begins."""
    if not place.stacked or output.expert is None:
        return 0
    per_expert = place.source.fused_rows or output.rule.shape[0]
    return output.expert * (output.rule.shape[-1] if place.source.transposed else per_expert)


def _picked(output: Output, place: Place) -> Rows | None:
    """Which rows of a stacked, fused tensor are the output's; None where they are all, in order."""
    fused = place.source.fused_rows
    if not place.stacked or place.source.rows is None or fused is None or output.shape[0] == fused:
        return None
    return place.source.rows


def _interleaved(base: ReadRows, first: int, rows: Rows, start: int, stop: int) -> torch.Tensor:
    if start // rows.block == (stop - 1) // rows.block:  # one run
        begin = first + rows.stored(start)
        return base(begin, begin + stop - start)
    import torch

    lowest, highest = rows.stored(start), rows.stored(stop - 1) + 1
    index = torch.tensor([rows.stored(row) - lowest for row in range(start, stop)])
    return base(first + lowest, first + highest)[index]


def _columns(store: TensorStore, name: str, first: int, output: Output, start: int, stop: int) -> torch.Tensor:
    """Rows of ours are columns of theirs: every stored row is read and the wanted part of it kept, a slab at a time."""
    import torch

    if len(output.shape) == 1:
        return store.read(name, start, stop)
    num_in = output.shape[1]
    slab = max(1, (8 << 20) // (store.shape(name)[-1] * 4))
    parts = [
        store.read(name, first + low, first + min(low + slab, num_in))[:, start:stop].clone() for low in range(0, num_in, slab)
    ]
    return torch.cat(parts).t().contiguous()


def _decoded(store: TensorStore, output: Output, place: Place) -> ReadRows:
    """Reads rows of the stored tensor and widens published 8- and 4-bit weights."""
    if place.source.encoding:
        return lambda start, stop: _mxfp4(store, place.name, start, stop)
    if store.dtype(place.name) != "F8_E4M3":
        return lambda start, stop: store.read(place.name, start, stop)
    names = store.names()
    if f"{place.name}_scale_inv" in names:
        return lambda start, stop: _fp8_blocks(store, place.name, start, stop)
    return lambda start, stop: _fp8_rows(store, place.name, start, stop)


def _mxfp4(store: TensorStore, name: str, start: int, stop: int) -> torch.Tensor:
    from windlass.quant.published import mxfp4

    scales = store.read(f"{name}_scales", start, stop)
    per_row = scales.shape[1]
    blocks = store.read(f"{name}_blocks", start * per_row, stop * per_row)
    return mxfp4(blocks.view(stop - start, per_row, -1), scales)


def _fp8_rows(store: TensorStore, name: str, start: int, stop: int) -> torch.Tensor:
    from windlass.quant.published import fp8_rows

    scale, whole = f"{name}_scale", store.shape(f"{name}_scale")
    per_row = prod(whole) > 1
    return fp8_rows(store.read(name, start, stop), store.read(scale, start, stop) if per_row else store.read(scale, 0, 1))


def _fp8_blocks(store: TensorStore, name: str, start: int, stop: int) -> torch.Tensor:
    from windlass.quant.published import FP8_BLOCK, fp8_blocks

    first, last = start // FP8_BLOCK, -(-stop // FP8_BLOCK)
    return fp8_blocks(store.read(name, start, stop), store.read(f"{name}_scale_inv", first, last), start - first * FP8_BLOCK)

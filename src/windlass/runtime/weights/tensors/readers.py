"""Finds a tensor in a checkpoint and reads its rows, however stored: plain, fused, transposed, stacked, fp8, MXFP4, packed int.

Rows are returned as numbers; `load.quantized` reads codes. Knows no ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from math import prod
from typing import TYPE_CHECKING, Protocol

import msgspec

from windlass.core.constants import FP8_BLOCK
from windlass.core.model import Frozen
from windlass.core.ports import TensorStore
from windlass.core.rule import Rule, Source, StridedRows

if TYPE_CHECKING:
    import torch

ReadRows = Callable[[int, int], "torch.Tensor"]
"""Rows start..stop of a tensor, [rows, in] (or elements of a vector), in the stored dtype or float32."""

PREFIXES = ("transformer.", "model.")
"""Some checkpoints prefix every name with one of these."""

# Buffers that older code saved with the weights; not parameters.
BUFFERS = re.compile(
    r".*(rotary_emb\.inv_freq|\.attn\.(masked_)?bias|attention\.(masked_)?bias|\.attn\.masked_bias|position_ids)"
)
SCALES = ("_scale", "_scale_inv", "_blocks", "_scales")
PACKED_PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
_PLAIN_FORM, _ENCODED_FORM = ("", "_scale", "_scale_inv"), ("_blocks", "_scales")
_PACKED_FORM = ("_packed", "_scale", "_zero_point", "_g_idx")
SHORT_RUN_ROWS = 8
"""Interleaved rows in shorter runs than this are read together with the rows between them; longer runs are read separately."""


class TensorToRead(Protocol):
    """What a reader needs to know of a tensor: one of ours, or a published one in which several of ours are fused."""

    @property
    def rule(self) -> Rule: ...
    @property
    def layer(self) -> int | None: ...
    @property
    def expert(self) -> int | None: ...
    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in] or [n]; as in the file where `as_stored`."""
        ...

    @property
    def as_stored(self) -> bool: ...


class ModelTensor(Frozen, gc=False):
    """One tensor of the model: a rule, with its layer and expert."""

    rule: Rule
    layer: int | None = None
    expert: int | None = None
    as_stored: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rule.shape

    @property
    def name(self) -> str:
        return self.rule.ours.format(layer=self.layer, expert=self.expert)


class TensorLocation(Frozen, gc=False):
    """Where a tensor is stored: its name in the checkpoint, and which of the rule's layouts it has."""

    name: str
    source: Source
    stacked: bool
    packed: bool = False
    """In the packed layout of compressed-tensors, always [out, in]: NAME_packed, NAME_scale, NAME_shape."""

    @property
    def transposed(self) -> bool:
        return self.source.transposed and not self.packed


def published_source(rule: Rule) -> Source:
    """The layout that conversion writes: the published one, with experts unstacked where such names exist."""
    return next((source for source in rule.sources if not source.stacked), rule.sources[0])


def unstacked_name(source: Source, layer: int | None, expert: int) -> str:
    """Name that conversion gives an expert that is only published stacked: `experts.E.gate_up_proj.weight`."""
    return _unstacked(source).format(layer=layer, expert=expert)


def _unstacked(source: Source) -> str:
    stem, _, leaf = source.name.rpartition(".")
    leaf, kind = (leaf.removesuffix("_bias"), "bias") if leaf.endswith("_bias") else (leaf, "weight")
    return f"{stem}.{{expert}}.{leaf}.{kind}"


def spellings(name: str) -> list[str]:
    return [
        name,
        *(prefix + name for prefix in PREFIXES),
        *(name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)),
    ]


def layouts(rule: Rule) -> list[tuple[str, Source]]:
    """Names with `{layer}` and `{expert}`, in the order in which they are tried: the published layout, the others, stacks taken apart."""
    usual = published_source(rule)
    sources = (usual, *(other for other in rule.sources if other != usual))
    found = [(name, source) for source in sources for name in spellings(source.name)]
    for source in sources:
        if source.stacked:
            alone = Source(name=source.name, fused_rows=source.fused_rows, rows=source.rows)
            found += [(name, alone) for name in spellings(_unstacked(source))]
    return found


def locate_tensor(
    tensor: TensorToRead, names: Collection[str], tried: list[tuple[str, Source]] | None = None
) -> TensorLocation | None:
    """The first layout that the checkpoint has; None where it has none. `tried`: the rule's `layouts`."""
    for template, source in layouts(tensor.rule) if tried is None else tried:
        if found := _place_named(template.format(layer=tensor.layer, expert=tensor.expert), source, names):
            return found
    return None


def _place_named(name: str, source: Source, names: Collection[str]) -> TensorLocation | None:
    if (f"{name}_blocks" if source.encoding else name) in names:
        if source.transposed and f"{name}_scale" in names:  # conversion to fp8 writes [out, in]
            source = msgspec.structs.replace(source, transposed=False)
        return TensorLocation(name=name, source=source, stacked=source.stacked)
    if not source.stacked and f"{name}_packed" in names:
        return TensorLocation(name=name, source=source, stacked=False, packed=True)
    return None


def stored_names(location: TensorLocation) -> set[str]:
    """Every stored tensor of a location: weight, scales, zero points."""
    stem = location.name.removesuffix(".weight")
    if location.packed:
        return {f"{stem}.{part}" for part in PACKED_PARTS}
    return {location.name, *(f"{location.name}{suffix}" for suffix in SCALES), *(f"{stem}.weight{suffix}" for suffix in SCALES)}


Form = tuple[tuple[str, tuple[int, ...]] | None, ...]


def stored_form(store: TensorStore, names: Collection[str], location: TensorLocation) -> Form:
    """Dtype and shape of each part that says how a tensor is stored; None for absent parts.

    What is said of one tensor of a rule (valid, its storage format) is true of all of the same form.
    """
    suffixes = _PACKED_FORM if location.packed else _ENCODED_FORM if location.source.encoding else _PLAIN_FORM
    parts = [location.name + suffix for suffix in suffixes]
    return tuple([(store.dtype(part), store.shape(part)) if part in names else None for part in parts])


def reader(store: TensorStore, tensor: TensorToRead, location: TensorLocation) -> ReadRows:
    if location.stacked and len(tensor.shape) == 1:
        return lambda start, stop: _vector(store, tensor, location, start, stop)
    base = _decoded(store, tensor, location)
    first, rows = first_row(tensor, location), row_selection(tensor, location)
    if location.transposed and not tensor.as_stored and len(tensor.shape) == 2:
        return lambda start, stop: _columns(store, location.name, first, tensor, rows, start, stop)
    if rows is None:
        return lambda start, stop: base(first + start, first + stop)
    return lambda start, stop: _interleaved(base, first, rows, start, stop)


def _vector(store: TensorStore, tensor: TensorToRead, location: TensorLocation, start: int, stop: int) -> torch.Tensor:
    """Stacked vectors: one row per expert; a store reads whole rows."""
    expert, rows = tensor.expert or 0, row_selection(tensor, location)
    whole = store.read(location.name, expert, expert + 1)[0]
    return whole[start:stop] if rows is None else whole[[rows.stored(row) for row in range(start, stop)]]


def first_row(tensor: TensorToRead, location: TensorLocation) -> int:
    """First row of this expert in the flattened stored tensor."""
    if not location.stacked or tensor.expert is None:
        return 0
    per_expert = location.source.fused_rows or tensor.rule.shape[0]
    return tensor.expert * (tensor.rule.shape[-1] if location.transposed else per_expert)


def row_selection(tensor: TensorToRead, location: TensorLocation) -> StridedRows | None:
    """Which rows of a fused tensor are ours; None: all of them, in order."""
    fused = location.source.fused_rows
    if location.source.rows is None or fused is None or tensor.as_stored or tensor.shape[0] == fused:
        return None
    return location.source.rows


def runs(rows: StridedRows | None, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Rows start..stop of ours as contiguous runs: (our first row, its stored row, count)."""
    while start < stop:
        count = stop - start if rows is None else min(stop - start, rows.block - start % rows.block)
        yield start, start if rows is None else rows.stored(start), count
        start += count


def _interleaved(base: ReadRows, first: int, rows: StridedRows, start: int, stop: int) -> torch.Tensor:
    import torch

    stretches = list(runs(rows, start, stop))
    if len(stretches) == 1 or rows.block >= SHORT_RUN_ROWS:
        parts = [base(first + stored, first + stored + count) for _, stored, count in stretches]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    lowest, highest = rows.stored(start), rows.stored(stop - 1) + 1
    index = torch.tensor([rows.stored(row) - lowest for row in range(start, stop)])
    return base(first + lowest, first + highest)[index]


def _columns(
    store: TensorStore, name: str, first: int, tensor: TensorToRead, rows: StridedRows | None, start: int, stop: int
) -> torch.Tensor:
    """Transposed storage: our rows are stored columns, so all rows are read, a slab at a time, and our columns kept."""
    import torch

    num_in = tensor.shape[1]
    slab = max(1, (8 << 20) // (store.shape(name)[-1] * 4))
    parts = [
        select_columns(store.read(name, first + low, first + min(low + slab, num_in)), rows, start, stop)
        for low in range(0, num_in, slab)
    ]
    return torch.cat(parts).t().contiguous()


def select_columns(slab: torch.Tensor, rows: StridedRows | None, start: int, stop: int) -> torch.Tensor:
    """Copies, of stored rows [n, stored columns], the columns that are our rows start..stop."""
    if rows is None:
        return slab[:, start:stop].clone()
    return slab[:, [rows.stored(row) for row in range(start, stop)]]


def _decoded(store: TensorStore, tensor: TensorToRead, location: TensorLocation) -> ReadRows:
    """Reader of stored rows that dequantizes published 8- and 4-bit weights."""
    if location.packed:
        from windlass.runtime.weights.tensors.packed import unpacked_rows

        return unpacked_rows(store, location.name, tensor.rule.shape[-1])
    if location.source.encoding:
        return lambda start, stop: _mxfp4(store, location.name, start, stop)
    if store.dtype(location.name) not in ("F8_E4M3", "I8"):
        return lambda start, stop: store.read(location.name, start, stop)
    if f"{location.name}_scale_inv" in store.names():
        return lambda start, stop: _fp8_blocks(store, location.name, start, stop)
    return lambda start, stop: _scaled_rows(store, location.name, start, stop)


def _mxfp4(store: TensorStore, name: str, start: int, stop: int) -> torch.Tensor:
    from windlass.runtime.quant.published import mxfp4

    scales = store.read(f"{name}_scales", start, stop)
    per_row = scales.shape[1]
    blocks = store.read(f"{name}_blocks", start * per_row, stop * per_row)
    return mxfp4(blocks.view(stop - start, per_row, -1), scales)


def _scaled_rows(store: TensorStore, name: str, start: int, stop: int) -> torch.Tensor:
    """fp8 or int8 with a scale per row or per tensor."""
    from windlass.runtime.quant.published import fp8_rows

    scale, whole = f"{name}_scale", store.shape(f"{name}_scale")
    per_row = prod(whole) > 1
    return fp8_rows(store.read(name, start, stop), store.read(scale, start, stop) if per_row else store.read(scale, 0, 1))


def _fp8_blocks(store: TensorStore, name: str, start: int, stop: int) -> torch.Tensor:
    from windlass.runtime.quant.published import fp8_blocks

    first, last = start // FP8_BLOCK, -(-stop // FP8_BLOCK)
    return fp8_blocks(store.read(name, start, stop), store.read(f"{name}_scale_inv", first, last), start - first * FP8_BLOCK)

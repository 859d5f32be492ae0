"""Matrices in the packed layout of compressed-tensors: which tensors they consist of, and their rows as codes or numbers.

`NAME_packed` holds the codes, `NAME_scale` a scale per group (or row), `NAME_zero_point` (optional) zero points, `NAME_shape` the
shape. Bits and group size are derived from the tensors' shapes, so any group size is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from windlass.core.model import Frozen
from windlass.core.ports import TensorStore
from windlass.core.scheme import Stored
from windlass.errors import BadCheckpoint

if TYPE_CHECKING:
    from torch import Tensor

ROWS_PER_WORD = 8
"""Zero points are packed eight rows to an int32."""
SCALE_TYPES = ("BF16", "F16", "F32")


class PackedLayout(Frozen):
    bits: int
    group: int
    """Inputs that share a scale; the row length for one scale per row."""
    zero_points: bool


def packed_layout(store: TensorStore, name: str, shape: tuple[int, ...]) -> PackedLayout:
    words, groups = store.shape(f"{name}_packed")[-1], store.shape(f"{name}_scale")[-1]
    bits = next((bits for bits in (4, 8) if -(-shape[-1] * bits // 32) == words), 0)
    if not bits or not groups or shape[-1] % groups:
        what = f"rows of {shape[-1]} in {words} words and {groups} groups are neither 4 nor 8 bits per weight"
        raise BadCheckpoint(what, tensor=name)
    return PackedLayout(bits=bits, group=shape[-1] // groups, zero_points=f"{name}_zero_point" in store.names())


def check_packed(store: TensorStore, name: str, shape: tuple[int, ...]) -> None:
    names = store.names()
    if f"{name}_scale" not in names:
        raise BadCheckpoint("quantized, but weight_scale is missing", tensor=name)
    if f"{name}_g_idx" in names:
        raise BadCheckpoint("activation ordering (weight_g_idx) is not supported", tensor=name)
    form = packed_layout(store, name, shape)
    rows, groups = shape[0], shape[1] // form.group
    expected = {"packed": ((rows, -(-shape[1] * form.bits // 32)), ("I32",)), "scale": ((rows, groups), SCALE_TYPES)}
    if form.zero_points:
        expected["zero_point"] = ((-(-rows * form.bits // 32), groups), ("I32",))
        if form.bits != 4:
            raise BadCheckpoint("8-bit weights with zero points are not supported", tensor=name)
    for part, (wanted, dtypes) in expected.items():
        found, dtype = store.shape(f"{name}_{part}"), store.dtype(f"{name}_{part}")
        if found != wanted or dtype not in dtypes:
            what = f"is {dtype} {list(found)}; expected {' or '.join(dtypes)} {list(wanted)}"
            raise BadCheckpoint(what, tensor=f"{name}_{part}")


def packed_rows(store: TensorStore, name: str, form: PackedLayout) -> Callable[[int, int], tuple[Tensor, Tensor, Tensor | None]]:
    """Reads rows start..stop: int32 words, scales [rows, groups], and zero points [rows, groups] in -8..7 or None."""
    from windlass.runtime.quant.packed import unpack_zero_points

    def read(start: int, stop: int) -> tuple[Tensor, Tensor, Tensor | None]:
        zeros = None
        if form.zero_points:
            first, last = start // ROWS_PER_WORD, -(-stop // ROWS_PER_WORD)
            whole = unpack_zero_points(store.read(f"{name}_zero_point", first, last), (last - first) * ROWS_PER_WORD)
            zeros = whole[start - first * ROWS_PER_WORD : stop - first * ROWS_PER_WORD]
        return store.read(f"{name}_packed", start, stop), store.read(f"{name}_scale", start, stop), zeros

    return read


def unpacked_rows(store: TensorStore, name: str, num_in: int) -> Callable[[int, int], Tensor]:
    """Reads rows dequantized to fp32."""
    from windlass.runtime.quant.packed import PackedMatrix

    form = packed_layout(store, name, (0, num_in))
    read = packed_rows(store, name, form)
    how = Stored(bits=form.bits, group=form.group, scale_bytes=2)

    def rows(start: int, stop: int) -> Tensor:
        words, scale, zeros = read(start, stop)
        if zeros is None:
            return PackedMatrix(how, words, scale, None, (stop - start, num_in)).dequantize()
        codes = PackedMatrix(how, words, scale.new_ones(scale.shape), None, (stop - start, num_in)).dequantize()
        grouped = codes.view(stop - start, scale.shape[1], -1).sub_(zeros.unsqueeze(-1))
        return grouped.mul_(scale.float().unsqueeze(-1)).view(stop - start, num_in)

    return rows

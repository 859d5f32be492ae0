"""How a checkpoint stores a matrix and how it is held in memory: quantized codes, or a dense dtype. Reads no weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch

from windlass.core.constants import FP8_BLOCK
from windlass.core.ggml.forms import FORMS
from windlass.core.model import Frozen
from windlass.core.ports import QuantizingStore, TensorStore
from windlass.core.rule import Rule
from windlass.model.formats.dtypes import torch_dtype
from windlass.runtime.kernels.packing.panels import BLOCK
from windlass.runtime.weights.tensors.packed import packed_layout
from windlass.runtime.weights.tensors.readers import Form, ModelTensor, TensorLocation, stored_form
from windlass.runtime.weights.tensors.shards import TensorShard


class CodeFormat(Frozen):
    """Panels that hold the stored codes and scales exactly (kernels.packing.panels)."""

    kind: str
    group: int
    """Inputs that share a scale; 0: one scale per row."""
    scale: str
    """`BF16`, `F16` or `F32`."""

    def local_group(self, num_in: int) -> int:
        return self.group or num_in

    def holds(self, left: int, right: int) -> bool:
        """Whether it can be sliced to inputs left..right: whole groups that are multiples of a block."""
        group = self.group or BLOCK
        return group % BLOCK == 0 and left % group == 0 and right % group == 0


class StorageFormat(Frozen):
    name: str
    """The file's name for it: `BF16`, `int4`, `Q6_K`, `F8_E4M3`, `mxfp4`."""
    bits: float
    """Per weight in the file, scales included."""
    codes: CodeFormat | None = None
    """None: loaded as dense numbers."""

    @property
    def dense(self) -> torch.dtype:
        """Dtype when loaded dense: its own, or bf16 if it was quantized."""
        return _PLAIN.get(self.name, torch.bfloat16)


_PLAIN = {"F32": torch.float32, "F64": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# ggml blocks: bits per weight in the file, and the panels that hold them: every type but these three has panels of its own.
_GGML = {
    "Q4_0": StorageFormat(name="Q4_0", bits=4.5, codes=CodeFormat(kind="int4", group=32, scale="F16")),
    "Q4_1": StorageFormat(name="Q4_1", bits=5.0, codes=CodeFormat(kind="int4_minima", group=32, scale="F16")),
    "Q8_0": StorageFormat(name="Q8_0", bits=8.5, codes=CodeFormat(kind="int8", group=32, scale="F16")),
} | {
    kind.upper(): StorageFormat(
        name=kind.upper(),
        bits=8 * form.stored_bytes / form.elements,
        codes=CodeFormat(kind=kind, group=form.elements, scale="F16"),
    )
    for kind, form in FORMS.items()
}
_MXFP4 = StorageFormat(name="mxfp4", bits=4.25, codes=CodeFormat(kind="int8", group=32, scale="BF16"))


def storage_format(store: TensorStore, tensor: ModelTensor, location: TensorLocation) -> StorageFormat:
    if hasattr(store, "packed_as"):
        return _quantized(cast(QuantizingStore, store), tensor, location)
    if location.packed:
        return _packed(store, tensor, location)
    if location.source.encoding:
        return _MXFP4
    block_type = getattr(store, "block_type", None)
    name: str = store.dtype(location.name) if block_type is None else block_type(location.name)
    if name in _GGML:
        found = _GGML[name]
        return found if len(tensor.shape) == 2 else StorageFormat(name="F32", bits=found.bits)
    if name == "F8_E4M3":
        group = FP8_BLOCK if f"{location.name}_scale_inv" in store.names() else 0
        return StorageFormat(name=name, bits=8, codes=CodeFormat(kind="fp8", group=group, scale="F32"))
    if name == "I8":
        return StorageFormat(name=name, bits=8, codes=CodeFormat(kind="int8", group=0, scale="F32"))
    return StorageFormat(name=name, bits=torch_dtype(name).itemsize * 8)


class StorageFormats:
    """`storage_format` of a store's tensors, found once per rule and stored form: experts are alike. Equal ones are one object.

    Each tensor is asked for several times while a model is opened and loaded; only the first time its parts are looked up."""

    def __init__(self, store: TensorStore) -> None:
        self._store, self._names = store, store.names()
        self._has_blocks = hasattr(store, "block_type")
        self._found: dict[tuple[int, bool, str, Form | str], tuple[Rule, StorageFormat]] = {}
        self._known: dict[tuple[int, str], StorageFormat] = {}
        """By rule and stored name."""

    def of(self, tensor: ModelTensor, location: TensorLocation) -> StorageFormat:
        key = id(tensor.rule), location.name
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._of(tensor, location)
        return known

    def _of(self, tensor: ModelTensor, location: TensorLocation) -> StorageFormat:
        rule = tensor.rule
        form = location.name if self._has_blocks else stored_form(self._store, self._names, location)
        key = id(rule), location.packed, location.source.encoding, form  # hashing a rule takes longer than the rest
        found = self._found.get(key)
        if found is None:  # kept with its rule, so that no other rule gets the same id
            found = self._found[key] = rule, storage_format(self._store, tensor, location)
        return found[1]


def _quantized(store: QuantizingStore, tensor: ModelTensor, location: TensorLocation) -> StorageFormat:
    """As it will be, once quantized; `bits` are those of the file."""
    rule, bits = tensor.rule, torch_dtype(store.dtype(location.name)).itemsize * 8
    how = store.packed_as(rule)
    if how is None:
        return StorageFormat(name=store.kept_dtype(rule), bits=bits)
    group = 0 if how.group == tensor.shape[-1] else how.group or 0
    return StorageFormat(name=f"int{how.bits}", bits=bits, codes=CodeFormat(kind=f"int{how.bits}", group=group, scale="BF16"))


def _packed(store: TensorStore, tensor: ModelTensor, location: TensorLocation) -> StorageFormat:
    found = packed_layout(store, location.name, tensor.shape)
    scale = store.dtype(f"{location.name}_scale")
    kind = "int4_zeros" if found.zero_points else f"int{found.bits}"
    bits = found.bits + (8 * torch_dtype(scale).itemsize + 4 * found.zero_points) / found.group
    group = 0 if found.group == tensor.shape[-1] else found.group
    return StorageFormat(name=f"int{found.bits}", bits=bits, codes=CodeFormat(kind=kind, group=group, scale=scale))


def common_code_format(shards: Iterable[TensorShard], forms: Iterable[StorageFormat]) -> CodeFormat | None:
    """One format for all of these concatenated; None where they differ, or are sliced inside a group."""
    found = {form.codes for form in forms}
    if len(found) != 1:
        return None
    (codes,) = found
    return codes if codes is not None and all(codes.holds(*shard.columns) for shard in shards) else None


def common_dtype(forms: Iterable[StorageFormat]) -> torch.dtype:
    """A dtype that represents all of them: fp16 with bf16 gives fp32."""
    found = {form.dense for form in forms}
    kind = found.pop()
    for other in found:
        kind = torch.promote_types(kind, other)
    return kind

"""A checkpoint of plain floats that is quantized while it loads: the same codes as `windlass convert` would write, without the files.

A store like any other; what is stored in fewer bits is known by `packed_as`, and `load.quantized` asks `coded` for its rows.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import msgspec

from windlass.core.place import stored
from windlass.core.ports import ByteStore, TensorStore
from windlass.core.rule import Rule
from windlass.core.scheme import Keep, Scheme, Stored, scheme
from windlass.errors import BadCheckpoint, BadInput
from windlass.runtime.weights.source import OpenedModel
from windlass.runtime.weights.tensors.readers import reader
from windlass.runtime.weights.tensors.shards import TensorShard

if TYPE_CHECKING:
    import torch

    from windlass.runtime.quant.packed import PackedMatrix


def quantized(opened: OpenedModel, name: str | None) -> OpenedModel:
    """The model as if it had been converted to the scheme; as it is, for None."""
    if name is None:
        return opened
    if opened.kind != "hf" or opened.config.get("quantization_config"):
        raise BadInput(
            f"--quant {name}: {opened.name or opened.spec.name} is quantized already; leave --quant out, or give a bf16 or fp32 checkpoint"
        )
    half = "F16" if _dtype_of(opened.config) == "float16" else "BF16"
    return msgspec.structs.replace(opened, store=QuantizingStore(opened.store, scheme(name), half))


class QuantizingStore:
    def __init__(self, behind: TensorStore, how: Scheme, half: str) -> None:
        """`half`: the dtype of what is not quantized."""
        self.config, self.half = behind.config, half
        self._behind, self._scheme = behind, how

    # --- core.ports.TensorStore

    def names(self) -> Collection[str]:
        return self._behind.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._behind.shape(name)

    def dtype(self, name: str) -> str:
        return self._behind.dtype(name)

    def read(self, name: str, start: int, stop: int) -> Any:
        return self._behind.read(name, start, stop)

    def read_into(self, name: str, byte_offset: int, buffer: memoryview) -> None:
        store: ByteStore = self._behind  # type: ignore[assignment]
        store.read_into(name, byte_offset, buffer)

    def close(self) -> None:
        self._behind.close()

    # --- quantization

    def packed_as(self, rule: Rule) -> Stored | None:
        """How a matrix is quantized; None: it stays in 16 bits, or 32 (see `kept_dtype`)."""
        if len(rule.shape) != 2 or not rule.ours.endswith(".weight") or rule.copy_of is not None:
            return None
        found = stored(rule, self._scheme)
        return found if found.bits < 16 else None

    def kept_dtype(self, rule: Rule) -> str:
        return "F32" if rule.keep is Keep.FLOAT32 else self.half

    def coded(self, shard: TensorShard, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of this rank's columns of rows start..stop."""
        made = self._packed(shard, start, stop)
        (left, right), num_in = shard.columns, shard.tensor.shape[-1]
        if made.shape[1] == right - left:
            return made.weight_packed, made.weight_scale
        words = made.weight_packed.shape[1]  # cut inside a group, which is a whole row: each part keeps its scale
        return made.weight_packed[:, words * left // num_in : words * right // num_in], made.weight_scale

    def dequantized(self, shard: TensorShard, start: int, stop: int) -> torch.Tensor:
        """The same as fp32 numbers: for a matrix that is used dense."""
        made, (left, right) = self._packed(shard, start, stop).dequantize(), shard.columns
        return made if made.shape[1] == right - left else made[:, left:right]

    def _packed(self, shard: TensorShard, start: int, stop: int) -> PackedMatrix:
        """Whole rows, or this rank's columns where these are whole groups: others may not be there (weights.transfer)."""
        import torch

        from windlass.runtime.quant import quantize_rows

        how = self.packed_as(shard.tensor.rule)
        assert how is not None, "only quantized matrices have codes"
        (left, right), group = shard.columns, how.group or shard.tensor.shape[-1]
        rows = reader(self._behind, shard.tensor, shard.location)(start, stop)
        if left % group == 0 and right % group == 0:
            rows = rows[:, left:right]
        rows = rows.contiguous()
        known = rows if rows.dtype in (torch.float32, torch.bfloat16, torch.float16) else rows.float()
        made, statistics = quantize_rows(known, how)
        if statistics.num_unusable:
            what = f"{statistics.num_unusable} values in rows {start} to {stop} are NaN, infinite or overflow the output type"
            raise BadCheckpoint(f"{what}; the source is damaged", tensor=shard.location.name)
        return made


def _dtype_of(config: dict[str, Any]) -> str:
    return str(config.get("torch_dtype") or config.get("dtype") or "").removeprefix("torch.")

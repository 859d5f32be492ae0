"""Memory of a decoder's weights, by how often a step reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from windlass.runtime.kernels.cuda.layout import Tiles
from windlass.runtime.kernels.cuda.sliced import SlicedTiles
from windlass.runtime.kernels.cuda.tiered import TieredTiles
from windlass.runtime.kernels.packing.matrix import StackedMatrix
from windlass.runtime.kernels.packing.packed_rows import PackedRows
from windlass.runtime.kernels.packing.panels import Panels
from windlass.runtime.kernels.packing.tiered import StreamedMatrix, TieredExperts
from windlass.runtime.nn.decoder import Decoder
from windlass.runtime.nn.moe import Experts, MixtureOfExperts
from windlass.tasks.bench.work import WeightBytes

Held = Tensor | Panels | PackedRows | StackedMatrix | Tiles | TieredTiles | SlicedTiles | StreamedMatrix | TieredExperts


def weight_bytes(decoder: Decoder) -> WeightBytes:
    """Every tensor once, also if shared (tied head, RoPE table)."""
    seen: set[int] = set()
    counted = {"always": 0, "experts": 0, "lookup": 0}
    for module in decoder.modules():
        for name, held in _tensors(module):
            if id(held) not in seen:
                seen.add(id(held))
                counted[_kind(decoder, module, name, held)] += num_bytes(held)
    return WeightBytes(**counted)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Held]]:
    """Parameters, buffers, and quantized panels, which PyTorch registers as neither."""
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    values: dict[str, Any] = {**dict(own), **vars(module)}
    return ((name, value) for name, value in values.items() if isinstance(value, Held))


def _kind(decoder: Decoder, module: nn.Module, name: str, held: Held) -> str:
    if isinstance(module, Experts):
        return "experts"
    if isinstance(module, MixtureOfExperts):  # router correction bias
        return "always"
    if module is decoder and name in ("table", "position_table") and held is not decoder.head:
        return "lookup"
    return "lookup" if name in dict(module.named_buffers(recurse=False)) else "always"  # RoPE and ALiBi tables: one row per token


def num_bytes(held: Held) -> int:
    if isinstance(held, PackedRows):
        return held.nbytes
    return held.numel() * held.element_size() if isinstance(held, Tensor) else held.num_bytes

"""Encodes and decodes the number types of a `.m` file: F32, F16, and blocks of 32 with an fp16 scale. Knows no file and no names.

Bit-identical to converter/writer.py of Distributed Llama: the extreme value divided by -8 (Q40) or 127 (Q80) in float32, its
float32 reciprocal, and only then the scale rounded to fp16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from windlass.errors import BadInput
from windlass.model.formats.dllama.file import WeightType

BLOCK = 32
SLICE_ELEMENTS = 2**18
"""Elements quantized at a time, so that temporaries stay in cache (1.5 ns per element; 4.9 at 2**22)."""

_Q40 = np.dtype([("scale", "<f2"), ("first", "<u8"), ("second", "<u8")])
_Q80 = np.dtype([("scale", "<f2"), ("codes", "i1", (BLOCK,))])


def encode(rows: torch.Tensor, kind: WeightType) -> np.ndarray:
    """Rows as flat bytes of the file. Raises BadInput for values that are not finite or overflow the type."""
    rows = rows.to(torch.float32).contiguous()
    if kind.block == 1:
        return _plain(rows, torch.float32 if kind is WeightType.F32 else torch.float16)
    blocks = rows.view(-1, BLOCK)
    out = np.empty(len(blocks), dtype=_Q40 if kind is WeightType.Q40 else _Q80)
    quantize = _quantize_q40 if kind is WeightType.Q40 else _quantize_q80
    step = SLICE_ELEMENTS // BLOCK
    for start in range(0, len(blocks), step):
        quantize(blocks[start : start + step], out[start : start + step])
    return out.view(np.uint8)


def _plain(rows: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    _refuse(rows)
    stored = rows.to(dtype)
    if dtype is torch.float16 and not torch.isfinite(stored).all():
        raise BadInput(f"a value of {rows.abs().max():.4g} overflows fp16 (max 65504); choose f32 or a quantized type")
    return stored.view(-1).numpy().view(np.uint8)


def _refuse(values: torch.Tensor) -> None:
    """Given block minima or maxima, to which NaN and infinity propagate."""
    if not torch.isfinite(values).all():
        raise BadInput("a weight is NaN or infinite; the checkpoint is damaged or its training diverged")


def _scales(delta: torch.Tensor) -> np.ndarray:
    scale = delta.to(torch.float16)
    if not torch.isfinite(scale).all():
        raise BadInput(f"a scale of {delta.abs().max():.4g} overflows fp16 (max 65504); choose f32")
    return scale.numpy()


def _inverse(delta: torch.Tensor) -> torch.Tensor:
    return torch.where(delta != 0, 1.0 / delta, 0.0)


def _quantize_q40(blocks: torch.Tensor, out: np.ndarray) -> None:
    """code = trunc(x / d + 8.5) with d = extreme / -8, where +max wins a tie with -max (ggml takes whichever comes first)."""
    high, low = blocks.amax(1), blocks.amin(1)
    _refuse(high)
    _refuse(low)
    # Adding 0.0 turns -0.0 into 0.0, so that a block of zeros always gets the same scale.
    delta = (torch.where(-low > high, low, high) + 0.0) / -8
    inverse = _inverse(delta)
    scaled = (blocks * inverse[:, None]).add_(8.5).clamp_(0, 15)
    if torch.isinf(inverse).any():  # values below 1e-38 give 0 * inf = NaN; the reference converter's cast makes it code 0
        scaled.nan_to_num_(nan=0.0)
    out["scale"] = _scales(delta)
    codes = scaled.to(torch.uint8).numpy().view("<u8")
    four = np.uint64(4)  # high nibbles are zero, so eight bytes can be shifted as one word
    out["first"] = codes[:, 0] | codes[:, 2] << four
    out["second"] = codes[:, 1] | codes[:, 3] << four


def _quantize_q80(blocks: torch.Tensor, out: np.ndarray) -> None:
    """code = round(x / d), half to even, with d = largest magnitude / 127."""
    high, low = blocks.amax(1), blocks.amin(1)
    _refuse(high)
    _refuse(low)
    delta = (torch.where(-low > high, -low, high) + 0.0) / 127
    inverse = _inverse(delta)
    inverse[torch.isinf(inverse)] = 0.0  # values below 1e-38; the reference converter's cast makes all codes 0
    out["scale"] = _scales(delta)
    out["codes"] = (blocks * inverse[:, None]).round_().to(torch.int8).numpy()


def decode(data: np.ndarray, kind: WeightType, width: int) -> torch.Tensor:
    """Decodes whole rows: F16 to float16, everything else to float32. Reuses `data`'s memory where possible."""
    if kind.block == 1:
        plain: np.ndarray[Any, Any] = data.reshape(-1).view("<f4" if kind is WeightType.F32 else "<f2")
        return torch.as_tensor(plain).view(-1, width)
    if kind is WeightType.Q40:
        return _dequantize_q40(data.reshape(-1, kind.block_bytes)).view(-1, width)
    blocks = data.reshape(-1).view(_Q80)
    values = blocks["codes"].astype(np.float32)
    values *= blocks["scale"].astype(np.float32)[:, None]
    return torch.as_tensor(values).view(-1, width)


def _dequantize_q40(blocks: np.ndarray) -> torch.Tensor:
    values = np.empty((len(blocks), 2, BLOCK // 2), dtype=np.float32)
    codes = np.ascontiguousarray(blocks[:, 2:])
    values[:, 0] = codes & 0xF
    values[:, 1] = codes >> 4
    values -= 8
    values *= np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)[:, :, None]
    return torch.as_tensor(values)

"""Quantization schemes: `quantize` packs weights offline; `PackedMatrix` dequantizes, slices and multiplies them. Knows no files."""

from windlass.runtime.quant.bounds import SMALLEST_ERROR, error_bound
from windlass.runtime.quant.kind import PackingKind, kind_of
from windlass.runtime.quant.packed import PackedMatrix, from_tensors
from windlass.runtime.quant.quantize import quantize, quantize_rows

__all__ = ["SMALLEST_ERROR", "PackedMatrix", "PackingKind", "error_bound", "from_tensors", "kind_of", "quantize", "quantize_rows"]

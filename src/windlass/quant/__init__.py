"""Schemes as a pair: `quantize` packs weights offline, `Packed` unpacks, cuts and multiplies them at run time. Knows no files."""

from windlass.quant.bounds import SMALLEST_ERROR, error_bound
from windlass.quant.kind import Kind, kind_of
from windlass.quant.packed import Packed, from_tensors
from windlass.quant.quantize import quantize, quantize_rows

__all__ = ["SMALLEST_ERROR", "Kind", "Packed", "error_bound", "from_tensors", "kind_of", "quantize", "quantize_rows"]

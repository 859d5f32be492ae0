"""Values that several packages must agree on. Imports nothing of Windlass."""

from __future__ import annotations

import msgspec

BLOCK_TOKENS = 16
"""Tokens of a KV cache block. Kernels are compiled for this size (runtime/kernels/native/simd/lanes.h)."""
FP8_BLOCK = 128
"""Rows and columns that share a scale in block-quantized fp8 checkpoints (DeepSeek-V3, arXiv 2412.19437, section 3.3.2)."""
MXFP4_BLOCK = 32
"""Elements that share an exponent (OCP Microscaling Formats, revision 1.0)."""

DECODE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)
"""What decoders of JSON, msgpack and TOML raise for foreign bytes. ValueError: text that is not Unicode, TOML that is none. RecursionError: nested
too deeply, which a few kilobytes can be."""

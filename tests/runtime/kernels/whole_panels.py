"""Whole matrices as panels, for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.runtime.kernels.packing.panel_data import BLOCK, CODE_BYTES
from windlass.runtime.kernels.packing.panels import Panels


def of_words(kind: str, codes: Tensor, scale: Tensor, offset: Tensor | None = None) -> Panels:
    """See `Panels.put`."""
    num_in = int(codes.shape[1] * codes.element_size() / CODE_BYTES[kind])
    panels = Panels.allocate(kind, codes.shape[0], num_in, num_in // scale.shape[1], scale_dtype=scale.dtype)
    panels.put(0, codes, scale, offset)
    return panels


def of_blocks(kind: str, blocks: Tensor, num_in: int) -> Panels:
    """Of GGML's blocks, see `Panels.put_blocks`."""
    panels = Panels.allocate(kind, blocks.shape[0], num_in, BLOCK, scale_dtype=torch.float16)
    panels.put_blocks(0, blocks)
    return panels

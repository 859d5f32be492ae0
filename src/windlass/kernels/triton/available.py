"""Whether the Triton kernels may take some tensors. Imports no triton until they may."""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import cache
from types import ModuleType

import torch
from torch import Tensor


def kernels(*tensors: Tensor | None) -> ModuleType | None:
    """windlass.kernels.triton.ops, or None where the tensors are another's business."""
    return _ops() if usable(*tensors) else None


def usable(*tensors: Tensor | None) -> bool:
    """On one CUDA GPU (or on the CPU under Triton's interpreter, for tests), and no gradient has to flow."""
    given = [tensor for tensor in tensors if tensor is not None]
    kinds = {tensor.device.type for tensor in given}
    if kinds != {"cuda"} and not (kinds == {"cpu"} and emulated()):
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        return False
    return _installed()


def has_packed_kernels(device: torch.device) -> bool:
    """Whether something multiplies with packed weights there: the CPU's own kernels, or these."""
    return device.type == "cpu" or (device.type == "cuda" and _installed())


def emulated() -> bool:
    """Asked for by both: TRITON_INTERPRET alone might be meant for somebody else's kernels."""
    return os.environ.get("WINDLASS_TRITON") == "1" and interpreted()


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; under the interpreter as many as an H200 has, so that the same kernels are tested."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _ops() -> ModuleType:
    return importlib.import_module("windlass.kernels.triton.ops")

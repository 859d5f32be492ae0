"""Whether the Triton kernels support some tensors. Imports triton only if they do."""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from windlass.runtime.kernels.triton.device import interpreted


def kernels(*tensors: Tensor | None) -> ModuleType | None:
    """windlass.runtime.kernels.triton.ops, or None if not `usable`."""
    return _ops() if usable(*tensors) else None


def usable(*tensors: Tensor | None) -> bool:
    """On one CUDA GPU (or on the CPU under Triton's interpreter, for tests), and no gradient is needed."""
    present = [tensor for tensor in tensors if tensor is not None]
    kinds = {tensor.device.type for tensor in present}
    if kinds != {"cuda"} and not (kinds == {"cpu"} and emulated()):
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in present):
        return False
    return _installed()


def has_packed_kernels(device: torch.device) -> bool:
    """Whether there are kernels for packed weights on the device: native ones on the CPU, or these."""
    return device.type == "cpu" or (device.type == "cuda" and _installed())


def emulated() -> bool:
    """Needs both variables: TRITON_INTERPRET alone might be meant for other kernels."""
    return os.environ.get("WINDLASS_TRITON") == "1" and interpreted()


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _ops() -> ModuleType:
    return importlib.import_module("windlass.runtime.kernels.triton.ops")

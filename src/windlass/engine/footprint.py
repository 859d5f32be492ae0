"""Memory used by this process and its devices; cheap enough to read every second."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from windlass.core.request import DeviceMemory

_STATM = Path("/proc/self/statm")
"""Pages: all, resident, ... (proc(5)). Linux only; 0 elsewhere."""


def process_bytes() -> int:
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def device_memory() -> tuple[DeviceMemory, ...]:
    """Of devices in use; does not initialize CUDA."""
    if not torch.cuda.is_initialized():
        return ()
    return tuple(_of_device(number) for number in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(number))


def _of_device(number: int) -> DeviceMemory:
    free, total = torch.cuda.mem_get_info(number)
    return DeviceMemory(
        name=torch.cuda.get_device_name(number),
        used_bytes=total - free,
        total_bytes=total,
        own_bytes=torch.cuda.memory_reserved(number),
    )

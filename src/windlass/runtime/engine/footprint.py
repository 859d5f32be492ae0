"""Memory of the accelerators this process uses; cheap enough to read every second. Host memory: `runtime/machine/memory.py`."""

from __future__ import annotations

import torch

from windlass.core.request import DeviceMemory


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

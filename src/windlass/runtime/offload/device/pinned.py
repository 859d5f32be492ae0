"""Host memory that a GPU can read at the speed of the link."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from windlass.errors import DoesNotFit
from windlass.runtime.offload.tiers.memory import page_aligned
from windlass.units import format_bytes

PORTABLE_AND_MAPPED = 1 | 2
"""cudaHostRegisterPortable, cudaHostRegisterMapped."""


class PinnedMemory:
    """Pieces of host memory, each registered as a whole. They are unregistered when it is closed or forgotten."""

    def __init__(self, device: torch.device) -> None:
        """For a CPU, as in tests, it is plain memory; for shapes alone (the device "meta") none."""
        self._device = device
        self._pieces: list[Tensor] = []
        self.close = weakref.finalize(self, _unregister, self._pieces)

    def piece(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], zero."""
        if self._device.type == "meta" or not num_bytes:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device if num_bytes else "cpu")
        memory = page_aligned(num_bytes)
        # Pages are made by many threads here; while it registers, the driver would make them one by one.
        memory.zero_()
        if self._device.type != "cuda":
            return memory
        status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, PORTABLE_AND_MAPPED)
        if int(status):
            raise DoesNotFit(
                f"{format_bytes(num_bytes)} of host memory cannot be pinned ({status}); lower --host-memory, or raise the limit of locked "
                "memory (ulimit -l) and of the container",
                num_bytes,
            )
        self._pieces.append(memory)
        return memory


def _unregister(pieces: list[Tensor]) -> None:
    if pieces:
        torch.cuda.synchronize()  # kernels may be reading them
    for memory in pieces:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
    pieces.clear()

"""The arrays of a step, on the host and on the device. Knows no sequences: step_writer.py fills them."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.runtime.engine.schedule.scheduler import SchedulerLimits
from windlass.runtime.kernels.step import Step


class Buffers:
    """A Step on the device, and its host arrays: the same memory on a CPU, uploaded elsewhere.

    `separate`: two copies on a CPU too, to test the upload.
    """

    def __init__(self, limits: SchedulerLimits, device: torch.device, separate: bool = False) -> None:
        separate = separate or device.type != "cpu"
        rows, sequences, logits = limits.max_step_tokens, limits.max_decode_rows, limits.max_step_logits
        sizes = (rows, rows, rows, sequences + 1, sequences, logits, 3)
        self._host = _zeros(sum(sizes), device)
        self._device = self._host.to(device, copy=True) if separate else self._host
        self.tokens, self.positions, self.slots, self.starts, self.lengths, self.logit_rows, self.counts = (
            part.numpy() for part in self._host.split(sizes)
        )
        blocks = _zeros(sequences * limits.max_blocks, device).view(sequences, limits.max_blocks)
        self._host_blocks, self.blocks = blocks, blocks.numpy()
        self._device_blocks = blocks.to(device, copy=True) if separate else blocks
        tokens, positions, slots, starts, lengths, logit_rows, _ = self._device.split(sizes)
        _, _, _, host_starts, host_lengths, _, counts = self._host.split(sizes)
        candidates = torch.zeros(2, dtype=torch.int32)
        self.candidates = candidates.numpy()
        self.step = Step(
            tokens,
            positions,
            slots,
            starts,
            lengths,
            self._device_blocks,
            logit_rows,
            counts,
            host_starts,
            host_lengths,
            candidates,
        )
        self.device_counts = self._device.split(sizes)[-1]
        self._uploaded = torch.cuda.Event() if device.type == "cuda" else None

    def wait(self) -> None:
        """Until the host arrays may be refilled: an upload may still be in progress."""
        if self._uploaded is not None:
            self._uploaded.synchronize()

    def upload(self, num_sequences: int, blocks_changed: bool) -> None:
        if self._device is self._host:
            return
        is_cuda = self._uploaded is not None
        self._device.copy_(self._host, non_blocking=is_cuda)
        if blocks_changed:
            self.upload_blocks(num_sequences)
        elif self._uploaded is not None:
            self._uploaded.record()

    def upload_blocks(self, num_sequences: int) -> None:
        is_cuda = self._uploaded is not None
        self._device_blocks[:num_sequences].copy_(self._host_blocks[:num_sequences], non_blocking=is_cuda)
        if self._uploaded is not None:
            self._uploaded.record()


def _zeros(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, pin_memory=device.type == "cuda")

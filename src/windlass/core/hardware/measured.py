"""Figures measured on a machine, as values: what a benchmark reached, and what its parts can do at most."""

from __future__ import annotations

from windlass.core.model import Frozen


class MeasuredRun(Frozen):
    machine: str
    model: str
    engine: str
    scheme: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    decode_tokens_per_second: float
    prefill_tokens_per_second: float
    date: str

    @property
    def work(self) -> tuple[str | int, ...]:
        return self.machine, self.model, self.engine, self.scheme, self.batch, self.prompt_tokens, self.new_tokens


class MeasuredLimits(Frozen):
    """Bytes and operations per second; 0 where it was not measured."""

    read_bytes_per_second: float
    matmul_flops: float
    date: str
    host_read_bytes_per_second: float = 0.0
    """Of the host beside an accelerator."""
    link_bytes_per_second: float = 0.0
    """Pinned host memory to the device."""
    disk_bytes_per_second: float = 0.0
    launch_seconds: float = 0.0
    """Of an empty operation."""

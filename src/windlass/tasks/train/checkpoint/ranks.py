"""A separate gloo process group for checkpoints, so that saving does not interfere with training's collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from windlass.errors import Error

Result = TypeVar("Result")


class CheckpointGroup:
    """Created by all ranks together. A process without torch.distributed is a group of one."""

    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if together else 0
        self.size = dist.get_world_size() if together else 1
        self.group: Any = dist.new_group(backend="gloo") if together else None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def agree(self, work: Callable[[], Result]) -> Result:
        """Runs `work`; if it fails on any rank, all raise, so that none waits for a rank that gave up."""
        try:
            result, failure = work(), None
        except (Error, OSError) as error:
            result, failure = None, error
        failures = [found for found in self.gather(failure) if found is not None]
        if failures:
            raise failure or failures[0]
        return result  # pyright: ignore[reportReturnType]

    def close(self) -> None:
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
            self.group = None

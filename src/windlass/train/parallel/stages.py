"""Layers in stages, one after another on ranks of a pipeline; micro-batches through them by PyTorch's own 1F1B schedule.

Every rank has the whole micro-batch (documents, positions, targets), because samples are found by their number; only rows travel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from windlass.train.model.model import Micro, Trained
from windlass.train.step import Sums


class Staged(nn.Module):
    """A stage as the schedule calls it: rows in, rows out; the first takes tokens, the last gives what is to be differentiated."""

    def __init__(self, model: Trained) -> None:
        super().__init__()
        self.model = model
        self.coming: deque[Micro] = deque()
        """Micro-batches in the order in which the schedule brings their rows."""
        self.entropies: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        micro, shard = self.coming.popleft(), self.model.decoder.shard
        if shard.is_first:
            x = self.model.decoder.embedded(micro.step)
        x = self.model.hidden(x, micro.step)
        if not shard.is_last:
            return x
        losses = self.model.losses(x, micro)
        self.entropies.append(losses.entropy)
        return torch.stack([losses.objective])


class Pipeline:
    def __init__(self, staged: Staged, group: Any, device: torch.device) -> None:
        self.staged, self._group, self._device = staged, group, device
        self._schedules: dict[tuple[int, int], Any] = {}

    def run(self, micros: Sequence[Micro]) -> Sums:
        self.staged.coming.extend(micros)
        self.staged.entropies.clear()
        shard = self.staged.model.decoder.shard
        schedule = self._schedule(len(micros), micros[0].targets.shape[0])
        counted = torch.zeros(len(micros), 1, device=self._device)
        if shard.is_last:
            schedule.step(*(() if not shard.is_first else (counted,)), target=counted, losses=[])
        else:
            schedule.step(*((counted,) if shard.is_first else ()))
        return self._sums()

    def look(self, micros: Sequence[Micro]) -> Tensor:
        """Forward alone."""
        self.staged.coming.extend(micros)
        self.staged.entropies.clear()
        shard = self.staged.model.decoder.shard
        counted = torch.zeros(len(micros), 1, device=self._device)
        schedule = self._schedule(len(micros), micros[0].targets.shape[0])
        schedule.eval(*((counted,) if shard.is_first else ()), **({"target": counted, "losses": []} if shard.is_last else {}))
        return self._sums().entropy

    def _sums(self) -> Sums:
        found = self.staged.entropies
        return Sums(torch.stack(found).sum() if found else torch.zeros((), dtype=self._wide, device=self._device))

    @property
    def _wide(self) -> torch.dtype:
        return torch.promote_types(self.staged.model.decoder.dtype, torch.float32)

    def _schedule(self, num_micros: int, rows: int) -> Any:
        key = (num_micros, rows)
        if key not in self._schedules:
            shard = self.staged.model.decoder.shard
            size = shard.groups.pp.size
            kind = Schedule1F1B if num_micros >= size else ScheduleGPipe
            self._schedules[key] = kind(self._stage(rows), num_micros, loss_fn=_objective, scale_grads=False)
        return self._schedules[key]

    def _stage(self, rows: int) -> PipelineStage:
        """Shapes are told, so that nothing need be run to find them."""
        decoder = self.staged.model.decoder
        shard, place = decoder.shard, decoder.shard.groups.pp
        hidden = torch.empty(rows, decoder.spec.hidden_size, dtype=decoder.dtype, device="meta")
        taken = torch.empty(1, 1, device="meta") if shard.is_first else hidden
        given = torch.empty(1, dtype=self._wide, device="meta") if shard.is_last else hidden
        taken, given = (one.requires_grad_() for one in (taken, given))
        return PipelineStage(
            self.staged, place.rank, place.size, self._device, input_args=(taken,), output_args=(given,), group=self._group
        )


def _objective(given: Tensor, _: Tensor) -> Tensor:
    return given.sum()

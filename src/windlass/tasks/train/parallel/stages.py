"""Pipeline parallelism with PyTorch's 1F1B schedule.

Every rank prepares the whole micro-batch (documents, positions, targets) itself; only hidden states are sent between stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from windlass.tasks.train.model.model import MicroBatch, TrainingModel
from windlass.tasks.train.step import StepLosses


class StageModule(nn.Module):
    """A stage as the schedule calls it: hidden states in and out; the first embeds tokens, the last returns the loss."""

    def __init__(self, model: TrainingModel) -> None:
        super().__init__()
        self.model = model
        self.coming: deque[MicroBatch] = deque()
        """Micro-batches in schedule order."""
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
    def __init__(self, staged: StageModule, group: Any, device: torch.device) -> None:
        self.staged, self._group, self._device = staged, group, device
        self._schedules: dict[tuple[int, int], Any] = {}

    def run(self, micros: Sequence[MicroBatch]) -> StepLosses:
        self.staged.coming.extend(micros)
        self.staged.entropies.clear()
        shard = self.staged.model.decoder.shard
        schedule = self._schedule(len(micros), micros[0].targets.shape[0])
        placeholder = torch.zeros(len(micros), 1, device=self._device)
        if shard.is_last:
            schedule.step(*(() if not shard.is_first else (placeholder,)), target=placeholder, losses=[])
        else:
            schedule.step(*((placeholder,) if shard.is_first else ()))
        return self._sums()

    def evaluate(self, micros: Sequence[MicroBatch]) -> Tensor:
        """Forward only."""
        self.staged.coming.extend(micros)
        self.staged.entropies.clear()
        shard = self.staged.model.decoder.shard
        placeholder = torch.zeros(len(micros), 1, device=self._device)
        schedule = self._schedule(len(micros), micros[0].targets.shape[0])
        schedule.eval(
            *((placeholder,) if shard.is_first else ()), **({"target": placeholder, "losses": []} if shard.is_last else {})
        )
        return self._sums().entropy

    def _sums(self) -> StepLosses:
        found = self.staged.entropies
        return StepLosses(torch.stack(found).sum() if found else torch.zeros((), dtype=self._wide, device=self._device))

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
        """Shapes are given, so that no trial run is needed to infer them."""
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

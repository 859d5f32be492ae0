"""The trainer on PyTorch's own optimizers, for one process or any mesh of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from torch import Tensor

from windlass.tasks.train.loop.trainer import TensorsByName, Trainer, TrainerParts
from windlass.tasks.train.model.model import MicroBatch
from windlass.tasks.train.optim.master_weights import MasterWeights
from windlass.tasks.train.optim.optimizer import Optimizers, scale_gradients, squared_norm
from windlass.tasks.train.params.shards import tensor_or_shard
from windlass.tasks.train.step import Prefetcher, StepLosses, to_device


class TorchTrainer(Trainer):
    def __init__(self, parts: TrainerParts, masters: MasterWeights) -> None:
        super().__init__(parts, next(iter(masters.of.values())).device)
        self.masters = masters
        self.optimizer = Optimizers(self.settings.optimizer, masters.of, self.layouts)
        self._prefetcher = Prefetcher(self._prepare)

    def _update(self, first: int, lr: float) -> tuple[StepLosses, float]:
        prepared = self._prefetcher.take(first, first + self.settings.global_batch)
        losses = self.ranks.run(self.model, to_device(prepared, self.ranks, self.device))
        self.ranks.reduce_gradients(self.masters.of)
        norm = float(self._clip())
        if isfinite(norm):
            self.optimizer.step(lr)
            self.masters.refresh()
        self.optimizer.zero_grad()
        return losses, norm

    def _clip(self) -> Tensor:
        """The global gradient norm, before clipping."""
        trained = self.masters.of.items()
        weighted = [(parameter.grad, self.ranks.norm_weight(name)) for name, parameter in trained if parameter.grad is not None]
        norm = self.ranks.sum_over_all(squared_norm(weighted)).sqrt()
        limit = self.settings.optimizer.clip
        if limit is not None:
            scale_gradients(self.masters.of.values(), (limit / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _evaluate(self, micros: Sequence[MicroBatch]) -> Tensor:
        return self.ranks.evaluate(self.model, micros)

    # --- checkpoint state

    @property
    def _optimizer_steps(self) -> int:
        return self.optimizer.num_steps()

    def _tensors(self) -> tuple[TensorsByName, dict[str, TensorsByName]]:
        model: TensorsByName = {}
        for name, parameter in self.masters.of.items():
            self._put(model, name, parameter)
        for name, buffer in self._saved_buffers():
            self._put(model, name, buffer)
        optimizer: dict[str, TensorsByName] = {}
        for kind, tensors in self.optimizer.states().items():
            for name, tensor in tensors.items():
                self._put(optimizer.setdefault(kind, {}), name, tensor)
        return model, optimizer

    def _put(self, into: TensorsByName, name: str, tensor: Tensor) -> None:
        for part, view in self.ranks.local_slices(self.layouts[name], tensor.detach()):
            into[part.name] = tensor_or_shard(part, view, self.ranks.saved_slice(part))

    def _load_tensors(self, state: dict[str, Any]) -> None:
        """Tensors were loaded in place."""
        self.optimizer.set_steps(int(state["optimizer_steps"]))
        self.masters.refresh()

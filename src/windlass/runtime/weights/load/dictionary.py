"""Weights from a state_dict under Hugging Face names (core.ports.Weights)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from windlass.core.model import ModelSpec
from windlass.core.place import Placement
from windlass.core.rule import Rule
from windlass.runtime.weights.load.checkpoint import CheckpointWeights, Loaded
from windlass.runtime.weights.source import OpenedModel
from windlass.runtime.weights.stores.memory import MemoryStore
from windlass.runtime.weights.tensors.shards import TensorShard
from windlass.runtime.weights.tensors.validate import locate_tensors


class DictWeights(CheckpointWeights):
    """Everything dense and in `dtype`, vectors too. Any layout the rules know is read: as published, or as transformers stacks it.

    `requires_grad`: tensors are returned as leaves that require gradients.
    """

    def __init__(
        self,
        spec: ModelSpec,
        rules: tuple[Rule, ...],
        state_dict: Mapping[str, Tensor],
        *,
        requires_grad: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        placement: Placement | None = None,
        tp_index: int = 0,
    ) -> None:
        store = MemoryStore(state_dict)
        opened = OpenedModel(
            store=store, spec=spec, rules=rules, config={}, digest="", locations=locate_tensors(rules, store, others_allowed=True)
        )
        super().__init__(opened, placement=placement, tp_index=tp_index, device=device, dtype=dtype, keep_quantized=False)
        self._requires_grad = requires_grad

    def _dense_dtype(self, shards: list[TensorShard]) -> torch.dtype:
        return self.dtype

    def _vector_dtype(self) -> torch.dtype:
        return self.dtype

    def _report(self, shards: list[TensorShard], loaded: Loaded) -> Loaded:
        if isinstance(loaded, Tensor):
            loaded.requires_grad_(self._requires_grad)
        return loaded

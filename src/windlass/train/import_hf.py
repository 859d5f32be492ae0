"""A published checkpoint's tensors by our names, whole: where training goes on from weights that somebody else made.

Whatever the format is that `weights` reads; packed weights come back as numbers. One tensor at a time is held.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from windlass.core.model import ModelSpec
from windlass.core.rule import ModelPart, Rule
from windlass.errors import BadInput
from windlass.weights import open_model
from windlass.weights.source import OpenedModel
from windlass.weights.tensors.readers import reader
from windlass.weights.tensors.tensor_index import TensorIndex


class ImportedTensors:
    def __init__(self, opened: OpenedModel, dtype: torch.dtype = torch.float32) -> None:
        """`opened` with its places: what `open_model` gives."""
        self.spec, self.rules, self.config = opened.spec, opened.rules, opened.config
        self._opened, self._named, self._dtype = opened, TensorIndex(opened.rules), dtype

    def __enter__(self) -> ImportedTensors:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._opened.store.close()

    def has(self, name: str) -> bool:
        return name in self._opened.locations

    def tensor(self, name: str) -> Tensor:
        ours = self._named.get(name)
        rows = reader(self._opened.store, ours, self._opened.locations[name])
        return rows(0, ours.shape[0]).to(self._dtype).reshape(ours.shape)


def import_tensors(path: Path, spec: ModelSpec | None = None, rules: tuple[Rule, ...] | None = None) -> ImportedTensors:
    """`spec`: what the recipe says the model is; other weights are refused."""
    found = ImportedTensors(open_model(path))
    if spec is not None and _shape(found.rules) != _shape(rules or ()):
        found.close()
        raise BadInput(
            f"{path} holds {found.spec.name}, whose tensors are not those of the recipe's model; name the same model in both"
        )
    return found


def _shape(rules: tuple[Rule, ...]) -> set[tuple[str, tuple[int, ...], tuple[int, ...] | None, int]]:
    kept = (rule for rule in rules if rule.part is ModelPart.MAIN and rule.copy_of is None)
    return {(rule.ours, rule.shape, rule.layers, rule.num_experts) for rule in kept}

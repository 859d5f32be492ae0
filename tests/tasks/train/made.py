"""Tiny models of every family and data that can be learned, for tests of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from windlass.core.model import ModelSpec
from windlass.core.recipe.recipe import Recipe, recipe_from
from windlass.core.rule import Rule
from windlass.model.families import describe, rules

FOLDER = Path(__file__).parents[2] / "model" / "families" / "tiny"
NAMES = [path.stem for path in sorted(FOLDER.glob("*.json")) if path.stem not in ("evo2", "glm_moe_dsa")]


def tiny(name: str, **changes: Any) -> tuple[ModelSpec, tuple[Rule, ...]]:
    spec = describe({**json.loads((FOLDER / f"{name}.json").read_text()), **changes})
    return spec, rules(spec)


class Batch(NamedTuple):
    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor


class Counting:
    """Documents that count upwards, each by a step of its own, packed in rows: easy to learn, and a pure function of the sample."""

    def __init__(self, vocab_size: int, length: int = 16) -> None:
        self.vocab_size, self.sequence_length = vocab_size, length

    def batch(self, first_sample: int, count: int) -> Batch:
        rows = [self._row(sample) for sample in range(first_sample, first_sample + count)]
        return Batch(*(torch.stack(column) for column in zip(*rows, strict=True)))

    def _row(self, sample: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        source = torch.Generator().manual_seed(sample + 1)
        cut = int(torch.randint(3, self.sequence_length - 2, (), generator=source))
        tokens, documents, positions = [], [], []
        for number, size in enumerate((cut, self.sequence_length - cut)):
            first, step = torch.randint(1, 9, (2,), generator=source).tolist()
            tokens += [(first + step * at) % min(self.vocab_size, 32) for at in range(size)]
            documents += [number] * size
            positions += range(size)
        row, owner = torch.tensor(tokens), torch.tensor(documents, dtype=torch.int32)
        targets = torch.full_like(row, -100)
        targets[:-1] = torch.where(owner[1:] == owner[:-1], row[1:], -100)
        return row, targets, torch.tensor(positions), owner


class Asked(Counting):
    """Of each row another number of tokens is only read, so that ranks and micro-batches learn from unlike many."""

    def batch(self, first_sample: int, count: int) -> Batch:
        found = super().batch(first_sample, count)
        for row in range(count):
            found.targets[row, : 5 * (first_sample + row) % 9] = -100
        return found


def recipe(**sections: dict[str, Any]) -> Recipe:
    """Everything small: three samples a micro-batch."""
    table: dict[str, Any] = {
        "model": {"config": {}},
        "batch": {"global_batch": 4, "micro_batch": 2},
        "precision": {"compute": "fp32"},
        "optimizer": {"lr": 1e-2, "weight_decay": 0.01},
        "schedule": {"steps": 20, "warmup_steps": 2},
        "validation": {"samples": 8},
    }
    for name, section in sections.items():
        table[name] = {**table.get(name, {}), **section}
    return recipe_from(table)

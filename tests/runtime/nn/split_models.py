"""Tiny models of every family with random weights, whole and as ranks that are threads: what tests of splitting are made of."""

# ruff: noqa: E402 (tests/runtime/parallel is put on the path first)

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

PARALLEL = str(Path(__file__).parents[2] / "runtime" / "parallel")
if PARALLEL not in sys.path:
    sys.path.insert(0, PARALLEL)

from thread_ranks import run_ranks

from windlass.core.layout import Layout
from windlass.core.model import ModelSpec
from windlass.core.place import Interval, Placement, local_shape, place
from windlass.core.rule import Rule, stored_tensors
from windlass.core.scheme import Scheme, scheme
from windlass.model.families import describe, rules
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.step import Step
from windlass.runtime.nn import Decoder, ModelShard
from windlass.runtime.parallel.groups import Groups
from windlass.runtime.weights import DictWeights
from windlass.runtime.weights.tensors.tensor_index import TensorIndex

LEAST_LAYERS = 3
Steps = Sequence[tuple[Step, int]]
"""With how many blocks a cache must have for all of them."""


@dataclass(frozen=True)
class Model:
    spec: ModelSpec
    rules: tuple[Rule, ...]
    state: dict[str, Tensor]

    def weights(self, dtype: torch.dtype, placement: Placement | None = None, tp_index: int = 0) -> DictWeights:
        return DictWeights(self.spec, self.rules, self.state, dtype=dtype, placement=placement, tp_index=tp_index)


def model_of(config: dict[str, Any], seed: int = 0) -> Model:
    spec = describe(config)
    more = (spec.layers[-1],) * max(LEAST_LAYERS - spec.num_layers, 0)  # enough for three stages
    spec = msgspec.structs.replace(spec, layers=(*spec.layers, *more), engines=("windlass",))
    table = rules(spec)
    chance = torch.Generator().manual_seed(seed)
    encoded = any(rule.sources[0].encoding for rule in table)
    stored = stored_tensors(table, choice=1 if encoded else 0)
    return Model(spec, table, {tensor.name: _random(tensor.name, tensor.shape, chance) for tensor in stored})


def _random(name: str, shape: tuple[int, ...], chance: torch.Generator) -> Tensor:
    """Activations of about one, and nothing left at a neutral value."""
    drawn = torch.randn(shape, generator=chance, dtype=torch.float64)
    if len(shape) > 1:
        return drawn * (1.0 if "emb" in name or "wte" in name or "wpe" in name else 1.3 * shape[-1] ** -0.5)
    return drawn * 0.3 + float(name.endswith("weight"))


@dataclass(frozen=True)
class Split:
    """A way to cut a model up."""

    layout: Layout
    shares: tuple[float, ...] | None = None
    stages: tuple[Interval, ...] | None = None

    def placed(self, model: Model, how: Scheme | None = None) -> Placement:
        chosen = how or scheme("fp32")
        return place(model.rules, model.spec.num_layers, self.layout, chosen, shares=self.shares, stages=self.stages)


@dataclass(frozen=True)
class Ran:
    decoder: Decoder
    logits: list[Tensor]


MakeWeights = Callable[[Placement, int], Any]
Run = Callable[[Decoder, Steps], list[Tensor]]


def run_split(model: Model, split: Split, steps: Steps, run: Run, make: MakeWeights, how: Scheme | None = None) -> list[Ran]:
    """Of every rank: its decoder, and what it says."""
    placement = split.placed(model, how)

    def work(rank: int, groups: Groups) -> Ran:
        weights = make(placement, groups.tp.rank)
        decoder = Decoder(model.spec, weights, shard=ModelShard(placement, split.layout, groups))
        return Ran(decoder, run(decoder, steps))

    return run_ranks(split.layout, work)


def steps_of(model: Model, tiny: Any) -> Steps:
    """Two prompts together; one token of each, and one whose logits nobody wants; the last of both. Over blocks in no order."""
    tokens = [[(7 * at + 3 * sequence) % model.spec.vocab_size for at in range(14)] for sequence in range(2)]
    blocks = [[3], [1]]

    def step(spans: list[tuple[int, int]], wanted: list[int] | None = None, padding: int = 0) -> Any:
        chunks = [tiny.chunk(tokens[number], first, last, blocks[number]) for number, (first, last) in enumerate(spans)]
        return tiny.step(chunks, logit_rows=wanted, padding=padding), 4

    return [
        step([(0, 9), (0, 5)], [8, 13, 0]),
        step([(9, 10), (5, 6)]),
        step([(10, 12), (6, 8)], []),
        step([(12, 13), (8, 9)], None, 2),
    ]


def called(decoder: Decoder, steps: Steps) -> list[Tensor]:
    caches = decoder.make_caches(steps[0][1], decoder.dtype)
    with torch.no_grad():
        return [decoder(step, caches) for step, _ in steps]


def replayed(decoder: Decoder, steps: Steps) -> list[Tensor]:
    """As `called`, by a program that was recorded once, on buffers that are refilled; the talk between ranks is in it."""
    caches = decoder.make_caches(steps[0][1], torch.float32)
    most = 1 + max(step.tokens.shape[0] for step, _ in steps)
    buffers = Step(
        *(torch.full((most,), 2**30, dtype=torch.int32) for _ in range(3)),
        *_other_buffers(most),
        candidates=torch.zeros(2, dtype=torch.int32),
    )
    with program.record(buffers.counts[0:1]) as recorded:
        logits = decoder(buffers, caches)
    said: list[Tensor] = []
    for step, _ in steps:
        for to, source in zip(vars(buffers).values(), vars(step).values(), strict=True):
            if isinstance(source, Tensor):
                to[tuple(slice(size) for size in source.shape)] = source
        recorded.run()
        said.append(logits[: int(step.counts[2])].clone())
    return said


def _other_buffers(most: int) -> list[Tensor]:
    """starts, lengths, blocks, logit rows, counts."""
    return [torch.full(shape, 2**30, dtype=torch.int32) for shape in ((most + 1,), (most,), (most, 4), (most,))] + [
        torch.zeros(3, dtype=torch.int32)
    ]


def expected_elements(model: Model, placement: Placement, shard: ModelShard) -> int:
    """Numbers that a rank holds, from the placement alone."""
    spec, tp_index = model.spec, shard.tp_index
    experts = shard.experts(spec.experts.num_experts) if spec.experts else None
    total = 0
    for ours in TensorIndex(model.rules).held(spec, shard.layers(spec), experts):
        name = ours.rule.ours
        if ".indexer." in name or ".index" in name:
            continue  # attention is dense as far as it is exact
        if name.endswith((".o.bias", ".down.bias")):
            adds = shard.adds_expert_bias if ours.rule.num_experts else shard.adds_bias
            if not adds:
                continue
        total += int(torch.Size(local_shape(ours.rule, placement, tp_index)).numel())
    return total

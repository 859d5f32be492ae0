"""Tiny models of several families with weights at random, the same on every device: whole steps through all kernels at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from windlass.core.model import ModelSpec
from windlass.model.families import describe, rules
from windlass.runtime.kernels.packing.packed_rows import PackedRows
from windlass.runtime.kernels.step import BLOCK_TOKENS, KvCache, Step
from windlass.runtime.nn import Decoder
from windlass.runtime.weights.load.random import RandomWeights

FOLDER = Path(__file__).parents[4] / "model" / "families" / "tiny"
# Inputs in whole groups, where a family has these sizes.
WIDER = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "head_dim": 32, "kv_lora_rank": 32, "q_lora_rank": 64,
    "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
LENGTHS = (18, 2)


def spec_of(family: str) -> ModelSpec:
    """One layer of each kind that the family has."""
    config = json.loads((FOLDER / f"{family}.json").read_text())
    spec = describe(config | {key: value for key, value in WIDER.items() if key in config})
    layers = [layer for number, layer in enumerate(spec.layers) if layer not in spec.layers[:number]]
    return msgspec.structs.replace(spec, layers=tuple(layers))


class TinyWeights:
    """core.ports.Weights: numbers that bf16 holds, or packed as `kind` wherever there are whole groups of 32."""

    def __init__(self, spec: ModelSpec, device: str, dtype: torch.dtype, kind: str | None = None) -> None:
        self.device, self.dtype, self.kind = torch.device(device), dtype, kind
        self._made = RandomWeights(spec, rules(spec), quant="fp32")

    def matrix(self, *names: str) -> Any:
        found = self._made.matrix(*names)
        return self._held(found, 0, "router" not in names[0])

    def dense_matrix(self, *names: str) -> Tensor:
        return self._held(self._made.dense_matrix(*names), 0, False)

    def vector(self, *names: str) -> Tensor | None:
        found = self._made.vector(*names)
        return None if found is None else found.to(self.device)

    def experts(self, layer: int, *parts: str) -> Any:
        found = self._made.experts(layer, *parts)
        return self._held(found, len(found), True)

    def expert_vectors(self, layer: int, *parts: str) -> Tensor | None:
        found = self._made.expert_vectors(layer, *parts)
        return None if found is None else found.to(self.device)

    def _held(self, found: Tensor, num_experts: int, may_pack: bool) -> Any:
        num_out, num_in = found.shape[-2:]
        if self.kind is None or not may_pack or num_in % 32:
            return found.bfloat16().to(self.device, self.dtype)
        scale = torch.float32 if self.kind == "fp8" else torch.bfloat16
        made = PackedRows.random(
            self.kind, num_out, num_in, 32, num_experts, scale, "cpu", deviation=float(found.std()), seed=num_out
        )
        offset = None if made.offset is None else made.offset.to(self.device)
        return replace(made, data=made.data.to(self.device), scale=made.scale.to(self.device), offset=offset)


def step_of(spec: ModelSpec, first: Sequence[int], last: Sequence[int], device: str) -> Step:
    """Tokens first..last of each sequence; logits of the last row of each."""
    rows = [(sequence, at) for sequence, (start, stop) in enumerate(zip(first, last, strict=True)) for at in range(start, stop)]
    width = -(-max(LENGTHS) // BLOCK_TOKENS) + 1
    ends = [
        sum(stop - start for start, stop in list(zip(first, last, strict=True))[: number + 1]) for number in range(len(first))
    ]

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    return Step(
        tokens=ints([(7 * at + 3 * sequence) % spec.vocab_size for sequence, at in rows]),
        positions=ints([at for _, at in rows]),
        slots=ints([sequence * width * BLOCK_TOKENS + at for sequence, at in rows]),
        starts=ints([0, *ends]),
        lengths=ints(last),
        blocks=ints(range(len(first) * width)).view(len(first), width),
        logit_rows=ints([end - 1 for end in ends]),
        counts=torch.tensor([len(rows), len(first), len(first)], dtype=torch.int32),
    )


def decoder(family: str, device: str, dtype: torch.dtype, kind: str | None = None) -> tuple[Decoder, list[KvCache]]:
    spec = spec_of(family)
    made = Decoder(spec, TinyWeights(spec, device, dtype, kind), context_tokens=64)
    return made, made.make_caches(8, dtype, device)


def logits(made: Decoder, caches: list[KvCache], device: str) -> Tensor:
    """Of a prompt of each sequence, then of one token more each."""
    with torch.no_grad():
        prompts = made(step_of(made.spec, (0, 0), LENGTHS, device), caches)
        more = made(step_of(made.spec, LENGTHS, [length + 1 for length in LENGTHS], device), caches)
    return torch.cat((prompts, more))

"""What a model's steps launch, without a GPU and without weights: shapes only (the device "meta"), and kernels that are written down.

A launch is checked as the driver would check it; what it was compiled with is what NVRTC is to be given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from windlass.core.fused import BLOCK_INPUTS, slice_blocks
from windlass.core.place import stored
from windlass.core.rule import Rule
from windlass.core.scheme import scheme
from windlass.core.tiers.device import DeviceSplit
from windlass.core.tiers.values import Speeds
from windlass.model.families import describe, rules
from windlass.model.families.registry import find, published_config
from windlass.runtime.kernels.cuda import drafts, driver, int8, layout, linear, route
from windlass.runtime.kernels.step import BLOCK_TOKENS, Step
from windlass.runtime.nn import Decoder
from windlass.runtime.nn.moe import MixtureOfExperts
from windlass.runtime.offload.device.dense import DenseTieredWeights, cpu_shares
from windlass.runtime.offload.device.weights import DeviceTieredWeights
from windlass.runtime.weights.load.random import RandomWeights
from windlass.runtime.weights.load.tiled import is_gate_up

PROCESSORS, MAX_SHARED, MAX_THREADS = 132, 227 * 1024, 1024
META = torch.device("meta")

Unit = tuple[str, tuple[tuple[str, int], ...]]
"""A file and its defines, in order."""


class Shapes(RandomWeights):
    """Tensors without numbers."""

    def _made(self, rules: list[Rule], name: str, num_experts: int = 0) -> Any:
        how, shape = stored(rules[0], self.scheme), self._shape(rules)
        if how.bits != 4 or how.group is None:
            return torch.empty(shape, dtype=self.dtype, device=META)
        paired = is_gate_up([rule.ours for rule in rules])
        return layout.empty(max(num_experts, 1), *shape, how.group, paired=paired, device=META)

    def _numbers(self, rule: Rule, name: str, before: tuple[int, ...]) -> Tensor:
        return torch.empty(*before, rule.shape[0], device=META)


class Recorder:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.units: dict[Unit, set[str]] = {}
        """And the functions that were asked for."""
        self.num_launches = 0
        patch.setattr(driver, "kernel", self._kernel)
        patch.setattr(driver, "num_processors", lambda: PROCESSORS)
        patch.setattr(driver, "rows_map", lambda data, _rows: data)
        patch.setattr(driver, "box_map", lambda *_: driver.NO_MAP)
        patch.setattr(int8, "cut_units", lambda: (torch.empty(1, device=META), torch.empty(1, device=META)))
        patch.setattr(linear, "counter", lambda: torch.empty(1, dtype=torch.int32, device=META))
        patch.setattr(route, "_dispatch_reference", self._dispatched)

    def _kernel(
        self, name: str, signature: str, function: str = "run", *, packed: bool = True, shared_bytes: int = 0, **defines: int
    ) -> Callable[..., None]:
        assert all(isinstance(value, int) for value in defines.values()), defines
        self.units.setdefault((name, tuple(sorted(defines.items()))), set()).add(function)

        def launch(
            grid: Any, threads: int, *arguments: Any, shared_bytes: int = shared_bytes, dependent: bool | None = None
        ) -> None:
            self.num_launches += 1
            told = f"{name} {function} {defines}, grid {grid}, {threads} threads, {shared_bytes} bytes"
            assert 1 <= len(grid) <= 3 and all(0 < size < 2**16 if i else 0 < size < 2**31 for i, size in enumerate(grid)), told
            assert 0 < threads <= MAX_THREADS and threads % 32 == 0 and 0 <= shared_bytes <= MAX_SHARED, told
            assert len(arguments) == len(signature), told
            for kind, argument in zip(signature, arguments, strict=True):
                if kind == "P":
                    assert argument is None or isinstance(argument, Tensor | int), told  # a number: an address in a mailbox
                elif kind == "M":
                    assert isinstance(argument, bytes) and len(argument) == driver.MAP_BYTES, told
                else:
                    assert isinstance(argument, float if kind == "f" else int), f"{told}: {argument!r} for {kind}"
                    assert kind == "f" or 0 <= argument < 2 ** (32 if kind == "I" else 64), told

        return launch

    def _dispatched(self, result: route.Routes) -> route.Routes:
        """As `route.dispatch` goes on on a device."""
        for function in ("dispatch_count", "dispatch_fill"):
            self.units.setdefault(("small.cu", (("EXPERTS", result.num_experts),)), set()).add(function)
        return result


def full_size(name: str, group: int = 128, routed: int = 1) -> Decoder:
    """The published shape with a few layers, one of every kind, or more of the last."""
    known = find(name)
    assert known is not None
    config = {key: value for key, value in published_config(known).items() if key != "quantization_config"}
    for key in {"num_layers", "num_hidden_layers"} & config.keys():
        config[key] = config.get("first_k_dense_replace", 0) + routed
    spec = describe(config, name)
    weights = Shapes(spec, rules(spec), quant=scheme("int4", group), device=META, tiled=True)
    assert weights.tiled
    return Decoder(spec, weights, 8192)


def offloaded(name: str) -> Decoder:
    """The same with a third of its experts in host memory; one layer guesses for the next."""
    whole = full_size(name, routed=2)
    first = next(number for number, layer in enumerate(whole.layers) if isinstance(layer.feed_forward, MixtureOfExperts))
    moe = whole.spec.experts
    assert moe is not None
    split = DeviceSplit(2, moe.num_experts, moe.num_experts * 2 // 3, moe.shared_intermediate_size > 0, share=0.6)
    weights = Shapes(whole.spec, rules(whole.spec), quant=scheme("int4", 128), device=META, tiled=True)
    return Decoder(whole.spec, DeviceTieredWeights(weights, split, first), 8192)


def sliced(name: str) -> Decoder:
    """A model without experts, half of its feed-forwards in host memory."""
    whole = full_size(name)
    blocks = whole.spec.layers[0].feed_forward.intermediate_size // BLOCK_INPUTS
    slices = blocks // slice_blocks(blocks)
    weights = Shapes(whole.spec, rules(whole.spec), quant=scheme("int4", 128), device=META, tiled=True)
    source = DenseTieredWeights(weights, DeviceSplit(1, slices, slices // 2, has_shared=False, share=0.6))
    decoder = Decoder(whole.spec, source, 8192)
    source.set_shares(cpu_shares(Speeds(host=6.0, link=4.0, disk=0.0), {1: 1.0, 64: 4.0}, slices - slices // 2))
    return decoder


def step_of(sequences: int, tokens: int, before: int = 0, is_chained: bool = False) -> Step:
    """So many new tokens of each sequence after those that are in the cache."""
    rows, length = sequences * tokens, before + tokens
    pages = -(-length // BLOCK_TOKENS)

    def ints(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int32, device=META)

    return Step(
        tokens=ints(rows), positions=ints(rows), slots=ints(rows), starts=ints(sequences + 1), lengths=ints(sequences),
        blocks=ints(sequences, pages), logit_rows=ints(sequences), counts=torch.tensor([rows, sequences, sequences]),
        host_starts=torch.arange(sequences + 1) * tokens, host_lengths=torch.full((sequences,), length),
        is_chained=is_chained,
    )  # fmt: skip


STEPS = [
    (1, 1, 100),
    (1, 1, 6000),
    (2, 1, 100),
    (3, 1, 100),
    (4, 1, 100),
    (8, 1, 3000),
    (9, 1, 50),
    (64, 1, 100),
    (128, 1, 100),
    (1, 2, 0),
    (1, 40, 0),
    (1, 200, 0),
    (1, 500, 0),
    (1, 700, 300),
    (1, 3000, 0),
]
"""Sequences, new tokens, and those before them: every way that a step can take."""


CHAINED_ROWS = (2, 9)
"""Rows of one sequence."""


def record(decoder: Decoder, patch: pytest.MonkeyPatch, kv: torch.dtype = torch.bfloat16) -> Recorder:
    recorder = Recorder(patch)
    for sequences, tokens, before in STEPS:
        step = step_of(sequences, tokens, before)
        with torch.inference_mode():
            logits = decoder(step, decoder.make_caches(4096, kv, "meta"))
        assert logits.shape == (sequences, decoder.spec.vocab_size)
    for rows in CHAINED_ROWS:
        step = step_of(rows, 1, 1000, is_chained=True)
        with torch.inference_mode():
            decoder(step, decoder.make_caches(4096, kv, "meta"))
        drafts.advance_pairs(step.tokens, step.tokens, step, step.lengths)
    return recorder

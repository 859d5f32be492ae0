"""Kernels of one to four rows on a GPU, and attention of several rows of one sequence, against plain PyTorch."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from cuda_references import (  # noqa: E402
    advance_pairs_reference,
    decode_attention_reference,
    experts_reference,
    linear_reference,
    norm_reference,
    route_reference,
)
from test_decode import EPS, mixture, poisoned, random_tiles  # noqa: E402
from test_decode import close as compared  # noqa: E402

from windlass.runtime.kernels.cuda import attention, drafts, driver, experts, layout, linear, route  # noqa: E402
from windlass.runtime.kernels.step import KvCache, Step  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHAPES = ((14336, 4096, 128), (4096, 12288, 128), (512, 4096, 32), (160, 1408, 128))


def compiled_together(test: Callable[[], None]) -> Callable[[], None]:
    """Runs it twice: kernels are many, and compile one after another when they are launched; first they are only named."""

    @functools.wraps(test)
    def run() -> None:
        with driver.collecting() as units:
            test()
        driver.compile_all(units)
        test()

    return run


def close(actual: Tensor, expected: Tensor, bound: float) -> None:
    if not driver.is_collecting():
        compared(actual, expected, bound)


def same(actual: Tensor, expected: Tensor) -> None:
    assert driver.is_collecting() or torch.equal(actual, expected)


def is_zero(counters: Tensor) -> None:
    assert driver.is_collecting() or not counters.any()


@compiled_together
def test_linear_of_few_rows() -> None:
    for rows, inputs, group in SHAPES:
        weight, bias = random_tiles(1, rows, inputs, group), torch.randn(rows, device="cuda")
        gain = torch.rand(inputs, device="cuda") + 0.5
        for count in (1, 2, 3, 4):
            # Rows of very different size: each has steps of its own.
            x = torch.randn(count, inputs, device="cuda") * torch.tensor([1.0, 30.0, 0.01, 5.0], device="cuda")[:count, None]
            normed = norm_reference(x, gain, EPS).to(torch.bfloat16)
            expected = linear_reference(normed, weight, bias=bias)
            bound = 1e-4  # fixed-point activations, integer products
            exact = linear_reference(norm_reference(x, gain, EPS), weight, bias=bias)
            for row, found in enumerate(linear.linear_few(x, weight, poisoned(count, rows), bias=bias, norm=gain, eps=EPS)):
                close(found, exact[row], bound)
            out = poisoned(count, rows, dtype=torch.bfloat16)
            for row, found in enumerate(linear.linear_few(normed, weight, out, bias=bias)):
                close(found, expected[row], 4e-3)
            residual = torch.randn(count, rows, device="cuda")
            expected = expected - bias + residual
            close(linear.linear_few(normed, weight, residual, residual=residual), expected, bound)


@compiled_together
def test_a_row_does_not_depend_on_those_beside_it() -> None:
    weight, gain = random_tiles(1, 4096, 4096), torch.rand(4096, device="cuda")
    x = torch.randn(4, 4096, device="cuda")
    alone = [linear.linear_few(row[None], weight, poisoned(1, 4096), norm=gain, eps=EPS)[0] for row in x]
    for count in (2, 3, 4):
        for first in range(5 - count):
            together = linear.linear_few(x[first : first + count], weight, poisoned(count, 4096), norm=gain, eps=EPS)
            for row, found in enumerate(together):
                close(found, alone[first + row], 1e-6)


def chosen_of(kind: str, rows: int) -> Tensor:
    """Logits by which rows choose other experts, the same ones, or some of each."""
    logits = torch.randn(rows, 32, device="cuda")
    if kind == "same":
        logits[:] = logits[0]
    if kind == "apart":
        for row in range(rows):
            logits[row, row * 8 : row * 8 + 8] += 20
    return logits


@compiled_together
def test_experts_of_few_rows() -> None:
    gate_up, down = mixture()
    gain, correction = torch.rand(1024, device="cuda") + 0.5, torch.rand(32, device="cuda")
    for rows in (1, 2, 3, 4):
        for kind in ("any", "same", "apart"):
            x, logits = torch.randn(rows, 1024, device="cuda"), chosen_of(kind, rows)
            chosen = route.routes(8, 32, 8, 1)
            normed = norm_reference(x, gain, EPS)
            act = poisoned(rows, 9 * 1408, dtype=torch.bfloat16)
            for _ in range(2):  # counters are as they were
                hidden = experts.gate_up_few(x, gain, gate_up, act, logits, correction, chosen, eps=EPS, routed_scale=2.5)
            ids, weights = route_reference(logits, correction, 8, 2.5)
            same(chosen.ids[:rows], ids)
            close(chosen.weights[:rows], weights, 1e-6)
            expected = experts_reference(normed.to(torch.bfloat16), ids, weights, gate_up, down, num_shared=1)
            for row, found in enumerate(experts.down_few(hidden, down, poisoned(rows, 1024), chosen)):
                close(found, expected[row], 4e-3)
            residual = x.clone()
            close(experts.down_few(hidden, down, residual, chosen, residual=residual), expected + x, 4e-3)
            is_zero(linear.counter())


@compiled_together
def test_experts_without_a_shared_one_and_dense() -> None:
    for shared, active in ((0, 4), (1, 0)):
        matrices = 32 + shared if active else 1
        gate_up, down = random_tiles(matrices, 2 * 768, 1024, paired=True), random_tiles(matrices, 1024, 768)
        gain = torch.rand(1024, device="cuda") + 0.5
        for rows in (1, 2, 4):
            x = torch.randn(rows, 1024, device="cuda")
            logits = torch.randn(rows, 32, device="cuda")
            chosen = route.routes(8, 32, active, shared) if active else route.all_rows(rows, 8)
            act = poisoned(rows, (active + shared) * 768, dtype=torch.bfloat16)
            hidden = experts.gate_up_few(x, gain, gate_up, act, logits, None, chosen, eps=EPS)
            ids, weights = route_reference(logits, None, max(active, 1))
            normed = norm_reference(x, gain, EPS).to(torch.bfloat16)
            expected = experts_reference(normed, ids[:, :active], weights[:, :active], gate_up, down, num_shared=shared)
            close(
                experts.down_few(hidden, down, poisoned(rows, 1024), chosen), expected, 6e-3
            )  # of a single row, which is rounded twice


@compiled_together
def test_router_of_few_rows() -> None:
    for inputs in (1024, 4096, 5120):
        gain, router = torch.rand(inputs, device="cuda") + 0.5, torch.randn(32, inputs, device="cuda") / 32
        for rows in (1, 2, 3, 4):
            x = torch.randn(rows, inputs, device="cuda")
            close(route.router_few(x, gain, router, poisoned(rows, 32), EPS), norm_reference(x, gain, EPS) @ router.T, 1e-5)


@compiled_together
def test_a_quantized_head_is_near() -> None:
    weight = torch.randn(4096, 1024, device="cuda").to(torch.bfloat16)
    tiles = layout.quantized(weight)
    same(tiles.data.cpu(), layout.quantized(weight.cpu()).data)
    close(layout.dequantize(tiles)[0], weight, 0.12)


def chained_case(chains: list[tuple[int, int]], heads: int, kv_heads: int) -> dict[str, Tensor]:
    """(length before, new rows) of each sequence. Slots of new rows hold numbers that must not be seen."""
    pages = [-(-(before + rows) // 16) for before, rows in chains]
    order = torch.randperm(sum(pages)).to(torch.int32)
    lists = torch.split(order, pages)
    places = [(number, before + row) for number, (before, rows) in enumerate(chains) for row in range(rows)]
    blocks = torch.zeros(len(places), max(pages), dtype=torch.int32)
    for row, (number, _) in enumerate(places):
        blocks[row, : pages[number]] = lists[number]
    positions = torch.tensor([place for _, place in places], dtype=torch.int32)
    slots = torch.tensor([int(lists[number][place // 16]) * 16 + place % 16 for number, place in places], dtype=torch.int32)
    angles = torch.rand(int(positions.max()) + 1, 32) * 6.28
    case = {
        "qkv": torch.randn(len(places), (heads + 2) * kv_heads * 128).to(torch.bfloat16),
        "table": torch.stack((angles.cos(), angles.sin()), dim=1),
        "positions": positions,
        "slots": slots,
        "lengths": positions + 1,
        "blocks": blocks,
        "keys": torch.randn(sum(pages), kv_heads, 128, 16).to(torch.bfloat16),
        "values": torch.randn(sum(pages), kv_heads, 16, 128).to(torch.bfloat16),
    }
    case["keys"][slots.long() // 16, :, :, slots.long() % 16] = 100.0
    case["values"][slots.long() // 16, :, slots.long() % 16] = -100.0
    return {name: tensor.cuda() for name, tensor in case.items()}


CHAINS = (
    [(0, 2)],
    [(200, 2)],
    [(15, 2), (30, 4), (16, 1)],
    [(1000, 2)],
    [(1023, 4)],
    [(1009, 9), (40, 1), (511, 3)],
    [(2000, 16)],
    [(9000, 2), (100, 2)],
)


def in_fp8(case: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same cache in fp8, made by the reference."""
    pages, kv_heads = case["keys"].shape[:2]
    cache = KvCache(
        torch.zeros(pages, kv_heads, 128, 16, dtype=torch.float8_e4m3fn, device="cuda"),
        torch.zeros(pages, kv_heads, 16, 128, dtype=torch.float8_e4m3fn, device="cuda"),
        scales=torch.full((pages, kv_heads, 2, 16), 127, dtype=torch.uint8, device="cuda"),
    )
    slots = torch.arange(pages * 16, device="cuda", dtype=torch.int32)
    keys = case["keys"].permute(0, 3, 1, 2).reshape(pages * 16, kv_heads, 128)
    cache.store(keys, case["values"].transpose(1, 2).reshape(pages * 16, kv_heads, 128), slots)
    assert cache.values is not None and cache.scales is not None
    return case | {"keys": cache.keys, "values": cache.values, "scales": cache.scales}


@compiled_together
def test_rows_of_a_sequence_see_each_other() -> None:
    heads, kv_heads, scale = 12, 8, 1 / math.sqrt(128)
    for chains in CHAINS:
        for fp8 in (False, True):
            case = chained_case(chains, heads, kv_heads)
            case = in_fp8(case) if fp8 else case
            expected_case = {name: tensor.clone() for name, tensor in case.items()}
            expected = decode_attention_reference(**expected_case, scale=scale)  # stores all, then attends
            rows = len(case["qkv"])
            for splits, shape in ((1, (4, 2)), (3, (8, 2)), (8, (8, 2))):
                space = attention.workspace(rows, heads * kv_heads, kv_heads, splits)
                fresh = {name: tensor.clone() for name, tensor in case.items()}
                out = poisoned(rows, heads * kv_heads * 128, dtype=torch.bfloat16)
                attention.decode_attention(**fresh, out=out, space=space, scale=scale, splits=splits, shape=shape, chained=True)
                for row in range(rows):
                    close(out[row], expected[row], 1e-2)
                if not fp8 and not driver.is_collecting():  # of which some codes differ by one, as keys do in their last bit
                    torch.testing.assert_close(fresh["keys"], expected_case["keys"], rtol=2**-7, atol=1e-5)
                same(fresh["values"].view(torch.uint8), expected_case["values"].view(torch.uint8))
                is_zero(space.arrived)


@compiled_together
def test_rows_of_other_sequences_are_not_taken_for_those_before() -> None:
    """Chained or not is the same where no row continues another."""
    case = chained_case([(40, 1), (41, 1), (700, 1), (3, 1)], 12, 8)
    found: list[Tensor] = []
    for chained in (False, True):
        fresh = {name: tensor.clone() for name, tensor in case.items()}
        out = poisoned(4, 96 * 128, dtype=torch.bfloat16)
        space = attention.workspace(4, 96, 8, 2)
        attention.decode_attention(**fresh, out=out, space=space, scale=0.09, splits=2, shape=(8, 2), chained=chained)
        found.append(out)
    same(*found)


def pairs(device: str, rows: int) -> Step:
    starts = torch.arange(0, rows, 2, dtype=torch.int32) * 7 + 13
    positions = torch.stack((starts, starts + 1), dim=1).flatten()[:rows]
    blocks = torch.randperm(2000, generator=torch.Generator().manual_seed(0)).to(torch.int32)[: rows * 40].view(rows, 40)
    parts = (torch.arange(rows, dtype=torch.int32) + 5, positions, torch.zeros(rows, dtype=torch.int32), positions + 1, blocks)
    tokens, positions, slots, lengths, blocks = (part.to(device) for part in parts)
    none = torch.zeros(0, dtype=torch.int32)
    return Step(tokens, positions, slots, none, lengths, blocks, none, none)


@compiled_together
def test_pairs_of_rows_advance() -> None:
    for rows, count in ((2, 2), (8, 8), (8, 6), (9, 9), (16, 4)):
        step, expected = pairs("cuda", rows), pairs("cpu", rows)
        chosen = expected.tokens.roll(-1) + (torch.arange(rows) % 4 == 2)  # every other draft is right
        chosen[rows - 1] = -1
        drafted = torch.arange(rows, dtype=torch.int32) + 1000
        counts = torch.tensor([count, count, count], dtype=torch.int32)
        advance_pairs_reference(chosen.int(), drafted, expected, counts)
        drafts.advance_pairs(chosen.int().cuda(), drafted.cuda(), step, counts.cuda())
        for name in ("tokens", "positions", "lengths", "slots"):
            same(getattr(step, name).cpu(), getattr(expected, name))

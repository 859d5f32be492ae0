"""The decode kernels against plain torch, on a GPU."""

# ruff: noqa: E402 (the folder of cuda_references is put on the path first)

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

CUDA_TESTS = str(Path(__file__).parent)
if CUDA_TESTS not in sys.path:
    sys.path.insert(0, CUDA_TESTS)

from cuda_references import (
    decode_attention_reference,
    experts_reference,
    linear_reference,
    norm_reference,
    rotate_reference,
    route_reference,
)

from windlass.core import integer_units
from windlass.runtime.kernels.cuda import attention, experts, int8, layout, linear, norm, route

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

EPS = 1e-5


def random_tiles(num_matrices: int, rows: int, inputs: int, group: int = 128, *, paired: bool = False) -> layout.Tiles:
    """From a checkpoint's layout, on the device."""
    codes = torch.randint(-(1 << 31), 1 << 31, (num_matrices, rows, inputs // 8), device="cuda").to(torch.int32)
    scales = ((torch.rand(num_matrices, rows, inputs // group, device="cuda") + 0.5) / 4.6 / inputs**0.5).to(torch.bfloat16)
    return layout.repack(codes, scales, paired=paired)


def close(actual: Tensor, expected: Tensor, bound: float) -> None:
    """Relative error in norm; poisoned or missing results are NaN and fail."""
    error = ((actual.double() - expected.double()).norm() / expected.double().norm()).item()
    assert error < bound, f"relative error {error:.2e}, bound {bound:.0e}"


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def test_repack_on_the_device_equals_the_reference() -> None:
    for rows, inputs, group, paired in ((64, 512, 128, False), (64, 512, 128, True), (32, 320, 64, True), (32, 96, 32, False)):
        codes = torch.randint(-(1 << 31), 1 << 31, (3, rows, inputs // 8)).to(torch.int32)
        scales = torch.rand(3, rows, inputs // group).to(torch.bfloat16)
        expected = layout.repack(codes, scales, paired=paired).data
        assert torch.equal(layout.repack(codes.cuda(), scales.cuda(), paired=paired).data.cpu(), expected)


def test_linear_of_several_rows() -> None:
    for rows, inputs, group in ((14336, 4096, 128), (4096, 12288, 128), (512, 4096, 32), (208, 1408, 128)):
        weight = random_tiles(1, rows, inputs, group)
        bias = torch.randn(rows, device="cuda")
        for count in (2, 8, 13, 64, 200):
            x = torch.randn(count, inputs, device="cuda").to(torch.bfloat16)
            plain = linear_reference(x, weight)
            bound = 1e-3 if group == 128 else 3e-3
            slices = linear.num_slices(weight)
            for product, columns in ((0, 1), (1, 1), (0, 2), (1, 2)):
                how = {"product": product, "columns": columns}
                fine = 1e-4 if product else bound
                close(linear.linear_eight(x, weight, poisoned(slices, count, rows), **how).sum(0), plain, fine)
                if slices == 1:
                    out = poisoned(count, rows, dtype=torch.bfloat16)
                    close(linear.linear_eight(x, weight, out, bias=bias, **how), plain + bias, 4e-3)
            slices = linear.wide_slices(weight)
            close(
                linear.linear_wide(x, weight, poisoned(slices, count, rows), slices=slices).sum(0),
                plain,
                bound if count <= 64 else 3e-3,
            )
            for unit in ((16, 1, 1), (32, 1, 1), (64, 1, 1), (128, 1, 1), (128, 2, 1), (144, 2, 1), (160, 2, 1), (256, 1, 1)):
                out = poisoned(count, rows, dtype=torch.bfloat16)
                close(linear.linear_wide(x, weight, out, bias=bias, unit=unit), plain + bias, 4e-3)
            for unit in ((16, 2, 2), (32, 2, 2), (64, 2, 2)) if weight.tile_blocks % 8 == 0 else ():
                for slices in (1, 4):
                    out = poisoned(slices, count, rows)
                    close(linear.linear_wide(x, weight, out, slices=slices, unit=unit).sum(0), plain, bound)
                out = poisoned(count, rows, dtype=torch.bfloat16)
                close(linear.linear_wide(x, weight, out, bias=bias, unit=unit), plain + bias, 4e-3)


def mixture(num_experts: int = 32, hidden: int = 1024, width: int = 1408) -> tuple[layout.Tiles, layout.Tiles]:
    return random_tiles(num_experts + 1, 2 * width, hidden, paired=True), random_tiles(num_experts + 1, hidden, width)


def test_experts_of_several_rows() -> None:
    gate_up, down = mixture()
    router, correction = torch.randn(32, 1024, device="cuda") / 32, torch.rand(32, device="cuda")
    for rows in (1, 2, 8, 29, 64):
        x = torch.randn(rows, 1024, device="cuda").to(torch.bfloat16)
        logits = route.router_many(x, router, poisoned(rows, 32))
        close(logits, x.float() @ router.T, 1e-5)
        chosen = route.route_many(logits, correction, route.routes(rows, 32, 8, 1))
        ids, weights = route_reference(logits, correction, 8)
        assert torch.equal(chosen.ids, ids)
        close(chosen.weights, weights, 1e-6)
        items = route.items_reference(ids, 32, 1)
        assert chosen.num_items.tolist() == [len(items), 0]
        assert len(items) <= chosen.item_expert.shape[0]
        for number, (expert, members, places) in enumerate(items):
            assert chosen.item_expert[number].item() == expert
            assert [r for r in chosen.item_rows[number].tolist() if r >= 0] == members
            assert [p for p in chosen.item_places[number].tolist() if p >= 0] == places
        plain = experts_reference(x, ids, weights, gate_up, down, num_shared=1)
        for product in (0, 1):
            for items in (chosen, route.dispatch(ids, weights, 32, 1, 16)):  # of 8 rows, of 16
                act = poisoned(rows * 9, 1408, dtype=torch.bfloat16)
                hidden = experts.gate_up_many(x, gate_up, act, items, product=product)
                parts = experts.down_many(hidden, down, poisoned(rows * 9, 1024), items, product=product).view(rows, 9, 1024)
                residual, gain = torch.randn(rows, 1024, device="cuda"), torch.rand(1024, device="cuda")
                expected, out = residual + plain, poisoned(rows, 1024, dtype=torch.bfloat16)
                norm.add_norm(residual, gain, out, EPS, parts=parts, weights=chosen.weights)
                close(residual, expected, 4e-3)
                close(out, norm_reference(residual, gain, EPS), 4e-3)


def test_rows_with_outliers_and_without_anything() -> None:
    """Fixed-point activations: a row of zeros gives zeros, one large input costs its row little and the others nothing."""
    weight = random_tiles(1, 256, 4096)
    x = torch.randn(8, 4096, device="cuda")
    x[1], x[2, 77], x[3] = 0.0, 300.0, x[3] * 1e-12
    x = x.to(torch.bfloat16)
    expected = linear_reference(x, weight)
    actual = linear.linear_eight(x, weight, poisoned(1, 8, 256), product=1)[0]
    assert not actual[1].any()
    for row in (0, 2, 3, 4, 5, 6, 7):
        close(actual[row], expected[row], 5e-4 if row == 2 else 1e-4)
    x[5, 9] = float("nan")
    actual = linear.linear_eight(x, weight, poisoned(1, 8, 256), product=1)[0]
    assert actual[5].isnan().all()
    close(actual[6], expected[6], 1e-4)


def test_experts_of_many_rows() -> None:
    gate_up, down = mixture()
    rows = 300
    # From a few rows an expert to most: items of every width.
    logits, correction = (
        torch.randn(rows, 32, device="cuda") + torch.linspace(-1.5, 1.5, 32, device="cuda"),
        torch.rand(32, device="cuda"),
    )
    x = torch.randn(rows, 1024, device="cuda").to(torch.bfloat16)
    ids, weights = route.choose_many(logits, correction, 8)
    expected_ids, expected_weights = route_reference(logits, correction, 8)
    assert torch.equal(ids, expected_ids)
    close(weights, expected_weights, 1e-6)
    parts = torch.stack((logits.bfloat16().float(), logits - logits.bfloat16().float(), torch.zeros_like(logits)), dim=1)
    assert torch.equal(route.choose_many(parts, correction, 8)[0], expected_ids)
    gain, plain = torch.rand(1024, device="cuda"), experts_reference(x, ids, weights, gate_up, down, num_shared=1)
    for size in (64, 128, 144, 160):
        chosen, expected = route.dispatch(ids, weights, 32, 1, size), route.dispatch(ids.cpu(), weights.cpu(), 32, 1, size)
        count = int(expected.num_items.item())
        assert chosen.num_items.item() == count
        assert torch.equal(chosen.item_expert[:count].cpu(), expected.item_expert[:count])
        assert torch.equal(chosen.item_rows[:count].cpu(), expected.item_rows[:count])
        assert torch.equal(chosen.item_places[:count].cpu(), expected.item_places[:count])
        hidden = experts.gate_up_wide(x, gate_up, poisoned(rows * 9, 1408, dtype=torch.bfloat16), chosen)
        parts = experts.down_wide(hidden, down, poisoned(rows * 9, 1024, dtype=torch.bfloat16), chosen).view(rows, 9, 1024)
        residual = torch.randn(rows, 1024, device="cuda")
        expected_sum = residual + plain
        norm.add_norm(residual, gain, poisoned(rows, 1024, dtype=torch.bfloat16), EPS, parts=parts, weights=weights)
        close(residual, expected_sum, 6e-3)


def rounded_reference(x: Tensor) -> Tensor:
    """Rows after rounding to 8 bits, a step for each 128 inputs."""
    blocks = x.float().unflatten(-1, (-1, 128))
    step = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    return ((blocks / step).round() * step).flatten(-2)


def test_integer_products_are_those_of_the_rounded_rows() -> None:
    for rows, inputs in ((2 * 1408, 1024), (1024, 1408), (272, 128 * 23)):
        weight, bias = random_tiles(1, rows, inputs), torch.randn(rows, device="cuda")
        for count in (5, 70, 300):
            x = torch.zeros(count, weight.width, device="cuda", dtype=torch.bfloat16)  # what fills inputs up is zero
            x[1:, :inputs] = torch.randn(count - 1, inputs, device="cuda")
            plain = rounded_reference(x)[:, :inputs] @ layout.dequantize(weight)[0].T
            rounded = int8.quantize_rows(x)
            for kind in integer_units.UNIT_KINDS:
                out = poisoned(count, rows, dtype=torch.bfloat16)
                way = integer_units.Cut(kind.rows, kind.shape, 1, 0.0)
                close(int8.linear(rounded, weight, out, bias=bias, way=way), plain + bias, 4e-3)
                if weight.tile_blocks % 4 == 0:  # ties round either way
                    close(int8.linear(rounded, weight, poisoned(4, count, rows), way=way._replace(slices=4)).sum(0), plain, 2e-3)
            close(int8.linear(rounded, weight, poisoned(count, rows, dtype=torch.bfloat16), bias=bias), plain + bias, 4e-3)
            close(int8.linear_parts(rounded, weight).float().sum(0), plain, 4e-3)


def test_units_that_thread_blocks_share_are_summed_in_one_order() -> None:
    """Fewer units than thread blocks, nearly two waves, and more; sums are handed on, and every launch gives the same bits."""
    for rows, inputs, count in ((1024, 8192, 64), (57344, 1024, 64), (4096, 2048, 2048)):
        weight = random_tiles(1, rows, inputs)
        x = torch.randn(count, inputs, device="cuda").to(torch.bfloat16)
        rounded = int8.quantize_rows(x)
        first = int8.linear(rounded, weight, poisoned(count, rows, dtype=torch.bfloat16))
        close(first, rounded_reference(x) @ layout.dequantize(weight)[0].T, 4e-3)
        for _ in range(20):
            assert torch.equal(int8.linear(rounded, weight, poisoned(count, rows, dtype=torch.bfloat16)), first)


def test_a_dense_gate_and_up_is_that_of_one_expert() -> None:
    gate_up = layout.random(1, 2 * 2112, 1024, 128, 1024**-0.5, paired=True)
    for count in (9, 64, 300):
        x = int8.quantize_rows(torch.randn(count, 1024, device="cuda").to(torch.bfloat16))
        found = int8.dense_gate_up_rounded(x, gate_up, 2176)
        routes = route.all_rows(count, 64)
        expected = int8.gate_up_rounded(x, gate_up, 2176, count, routes)
        assert (found.scales - expected.scales).abs().max() <= 0.01 * expected.scales.max()
        assert (found.codes.int() - expected.codes.int()).abs().max() <= 1


def test_experts_in_integers() -> None:
    gate_up, down = mixture()
    rows = 300
    logits = torch.randn(rows, 32, device="cuda") + torch.linspace(-1.5, 1.5, 32, device="cuda")
    x = torch.randn(rows, 1024, device="cuda").to(torch.bfloat16)
    ids, weights = route.choose_many(logits, None, 8)
    plain = experts_reference(x, ids, weights, gate_up, down, num_shared=1)
    for size in integer_units.SHAPES:
        chosen = route.dispatch(ids, weights, 32, 1, size)
        hidden = int8.gate_up(int8.quantize_rows(x), gate_up, poisoned(rows * 9, 1408, dtype=torch.bfloat16), chosen)
        parts = int8.down(int8.quantize_rows(hidden), down, poisoned(rows * 9, 1024, dtype=torch.bfloat16), chosen)
        residual = torch.zeros(rows, 1024, device="cuda")
        out = poisoned(rows, 1024, dtype=torch.bfloat16)
        norm.add_norm(residual, torch.ones(1024, device="cuda"), out, EPS, parts=parts.view(rows, 9, 1024), weights=weights)
        close(residual, plain, 3e-2)


def test_a_norm_in_eight_bits_is_its_rows_rounded() -> None:
    for rows, width in ((3, 1024), (70, 4096), (70, 5120), (300, 8192)):
        residual, gain = torch.randn(rows, width, device="cuda"), torch.rand(width, device="cuda")
        out, rounded = poisoned(rows, width, dtype=torch.bfloat16), int8.empty_rows(rows, width, torch.device("cuda"))
        norm.add_norm(residual, gain, out, EPS, rounded=rounded)
        expected = int8.quantize_rows(out)
        assert torch.equal(rounded.codes, expected.codes) and torch.equal(rounded.scales, expected.scales)


def test_rotate_store() -> None:
    """Rows anywhere, side by side, shifted, and of two sequences."""
    two = torch.cat((torch.arange(6), torch.arange(16, 48)))
    for slots in (torch.randperm(48)[:40], torch.arange(40), torch.arange(3, 40), two):
        for interleaved in (False, True):
            check_rotate_store(slots.to("cuda", torch.int32), interleaved)


def check_rotate_store(slots: Tensor, interleaved: bool) -> None:
    case, rows = attention_case([40], 96, 8, 64), len(slots)
    keys, values = case["keys"], case["values"]
    before = keys.clone(), values.clone()
    qkv = torch.randn(rows, 112 * 128, device="cuda").to(torch.bfloat16)
    positions = torch.arange(rows, device="cuda", dtype=torch.int32)
    q, k, v = qkv.view(rows, 112, 128).split((96, 8, 8), dim=1)
    turned = [rotate_reference(part, case["table"], positions, interleaved).to(torch.bfloat16) for part in (q, k)]
    actual = attention.rotate_store(qkv.clone(), case["table"], positions, slots, keys, values, 8, interleaved=interleaved)
    close(actual.view(rows, 112, 128), torch.cat((*turned, v), dim=1), 1e-3)
    page, offset = slots.long() // 16, slots.long() % 16
    close(keys[page, :, :, offset], turned[1], 1e-3)
    assert torch.equal(values[page, :, offset], v)
    # Nothing else was written.
    before[0][page, :, :, offset], before[1][page, :, offset] = keys[page, :, :, offset], v
    assert torch.equal(keys, before[0]) and torch.equal(values, before[1])


def test_add_norm_of_slices() -> None:
    for count in (1, 3, 4, 7):
        for rows, width in ((5, 4096), (64, 8192), (70, 4096)):
            residual, parts = torch.randn(rows, width, device="cuda"), torch.randn(count, rows, width, device="cuda")
            gain = torch.rand(width, device="cuda")
            expected = residual.clone()
            for part in parts:  # in their order
                expected += part
            out = poisoned(rows, width, dtype=torch.bfloat16)
            norm.add_norm(residual, gain, out, EPS, parts=parts)
            assert torch.equal(residual, expected)
            close(out, norm_reference(expected, gain, EPS), 4e-3)


def test_head_of_one_row() -> None:
    x, gain = torch.randn(4096, device="cuda"), torch.rand(4096, device="cuda")
    weight = torch.randn(5003, 4096, device="cuda").to(torch.bfloat16)
    close(norm.head_one(x, gain, weight, poisoned(5003), EPS), norm_reference(x, gain, EPS) @ weight.float().T, 1e-5)


def attention_case(lengths: list[int], heads: int, kv_heads: int, rotary: int) -> dict[str, Tensor]:
    pages = [-(-n // 16) for n in lengths]
    order = torch.randperm(sum(pages)).to(torch.int32)
    blocks = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    for row, count in enumerate(pages):
        blocks[row, :count] = order[sum(pages[:row]) :][:count]
    positions = torch.tensor(lengths, dtype=torch.int32) - 1
    slots = torch.stack([blocks[row, p // 16] * 16 + p % 16 for row, p in enumerate(positions.tolist())])
    angles = torch.rand(max(lengths), rotary // 2) * 6.28
    case = {
        "qkv": torch.randn(len(lengths), (heads + 2 * kv_heads) * 128).to(torch.bfloat16),
        "table": torch.stack((angles.cos(), angles.sin()), dim=1),
        "positions": positions,
        "slots": slots.to(torch.int32),
        "lengths": torch.tensor(lengths, dtype=torch.int32),
        "blocks": blocks,
        "keys": torch.randn(sum(pages), kv_heads, 128, 16).to(torch.bfloat16),
        "values": torch.randn(sum(pages), kv_heads, 16, 128).to(torch.bfloat16),
    }
    return {name: tensor.cuda() for name, tensor in case.items()}


def test_decode_attention() -> None:
    for lengths, splits, heads, interleaved in (
        ([1], 1, 12, False),
        ([200], 1, 12, False),
        ([200], 4, 12, True),
        ([17, 640, 1, 1500], 8, 12, False),
        ([33000], 48, 12, False),
        ([100, 16], 2, 4, False),
    ):
        kv_heads = 8
        case = attention_case(lengths, heads * kv_heads, kv_heads, 64)
        expected_case = {name: tensor.clone() for name, tensor in case.items()}
        expected = decode_attention_reference(**expected_case, scale=1 / math.sqrt(128), interleaved=interleaved)
        space = attention.workspace(len(lengths), heads * kv_heads, kv_heads, splits)
        for _ in range(2):
            out = poisoned(len(lengths), heads * kv_heads * 128, dtype=torch.bfloat16)
            attention.decode_attention(
                **case, out=out, space=space, scale=1 / math.sqrt(128), splits=splits, interleaved=interleaved
            )
            close(out, expected, 6e-3)
        for shape in attention.TOGETHER:
            out = poisoned(len(lengths), heads * kv_heads * 128, dtype=torch.bfloat16)
            rounded = int8.empty_rows(*out.shape, out.device)
            rounded.codes.fill_(-128)
            for into in (out, rounded):
                attention.decode_attention(
                    **case, out=into, space=space, scale=1 / math.sqrt(128), splits=splits, interleaved=interleaved, shape=shape
                )
            close(out, expected, 6e-3)
            again = int8.quantize_rows(out)
            assert torch.equal(rounded.codes, again.codes) and torch.equal(rounded.scales, again.scales)
        # Fused and separate products round the last bit of some keys differently.
        torch.testing.assert_close(case["keys"], expected_case["keys"], rtol=2**-7, atol=1e-5)
        assert torch.equal(case["values"], expected_case["values"])
        assert not space.arrived.any()

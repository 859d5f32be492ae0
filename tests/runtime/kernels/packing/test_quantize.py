"""The compiled loop, on every instruction set this machine has, gives the reference's bytes; and both lay codes out as agreed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windlass.errors import BadInput
from windlass.runtime.kernels import build
from windlass.runtime.kernels.packing import quantize
from windlass.runtime.kernels.packing.quantize import Quantized
from windlass.runtime.kernels.packing.statistics import Statistics, total

pytestmark = pytest.mark.cpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def sets_here() -> list[int]:
    native = build.library("quantize")
    return [] if native is None else list(range(native.windlass_instruction_set() + 1))


@pytest.fixture(params=sets_here(), ids=lambda number: quantize.INSTRUCTION_SETS[number])
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(quantize, "_best_set", lambda native: request.param)
    yield quantize.INSTRUCTION_SETS[request.param]


def reference(operation: Callable[[], Quantized]) -> Quantized:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WINDLASS_NO_NATIVE", "1")
        return operation()


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def assert_identical(one: Quantized, other: Quantized) -> None:
    for mine, theirs in ((one.codes, other.codes), (one.scale, other.scale), (one.zero_point, other.zero_point)):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
            assert raw(mine) == raw(theirs)
    assert one.statistics == other.statistics


def rows_of(kind: str, shape: tuple[int, int], seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    noise = torch.randn(shape, generator=made)
    match kind:
        case "heavy":
            return noise / torch.rand(shape, generator=made).clamp(min=1e-3)
        case "constant":
            return noise[:, :1].expand(shape)
        case "zero":
            return noise * 0
        case "two-sided":
            return noise.sign()
        case "one-sided":
            return noise.abs()
        case "ties":
            return torch.randint(-16, 16, shape, generator=made) * 0.5
        case "tiny":
            return noise * 1e-39
        case "huge":
            return noise * 2.0**120
        case "mixed":
            return noise * torch.exp(8 * torch.randn(shape, generator=made))
        case _:
            return noise * 0.02


KINDS = ("gaussian", "heavy", "constant", "zero", "two-sided", "one-sided", "ties", "tiny", "huge", "mixed")


@st.composite
def weights(draw: st.DrawFn, multiple: int) -> torch.Tensor:
    """A matrix whose rows may differ in kind, and may hold what is not a number."""
    rows, inputs = draw(st.integers(1, 37)), multiple * draw(st.integers(1, 4))
    if multiple == 1:
        inputs = draw(st.integers(1, 300))
    parts = [
        rows_of(draw(st.sampled_from(KINDS)), (count, inputs), draw(st.integers(0, 2**31)))
        for count in (rows - rows // 2, rows // 2)
        if count
    ]
    weight = torch.cat(parts).to(draw(st.sampled_from(DTYPES)))
    if weight.dtype is torch.float16:
        weight = weight.clamp(-65504, 65504)
    for value in draw(st.lists(st.sampled_from([float("nan"), float("inf"), -float("inf")]), max_size=2)):
        weight[draw(st.integers(0, rows - 1)), draw(st.integers(0, inputs - 1))] = value
    return weight


@SETTINGS
@given(
    group=st.sampled_from([32, 64, 128]),
    zero_points=st.booleans(),
    search=st.sampled_from(["none", "fast", "full"]),
    data=st.data(),
)
def test_int4_is_the_reference_to_the_byte(
    instruction_set: str, group: int, zero_points: bool, search: str, data: st.DataObject
) -> None:
    weight = data.draw(weights(group))
    assert_identical(
        quantize.int4(weight, group, zero_points=zero_points, search=search),
        reference(lambda: quantize.int4(weight, group, zero_points=zero_points, search=search)),
    )


@SETTINGS
@given(group=st.sampled_from([32, 128, None]), data=st.data())
def test_int8_is_the_reference_to_the_byte(instruction_set: str, group: int | None, data: st.DataObject) -> None:
    weight = data.draw(weights(group or 1))
    assert_identical(quantize.int8(weight, group), reference(lambda: quantize.int8(weight, group)))


@SETTINGS
@given(data=st.data())
def test_fp8_is_the_reference_to_the_byte(instruction_set: str, data: st.DataObject) -> None:
    weight = data.draw(weights(1))
    assert_identical(quantize.fp8(weight), reference(lambda: quantize.fp8(weight)))


def test_every_half_and_every_bf16_is_read_right(instruction_set: str) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(512, 128)
    for dtype in (torch.float16, torch.bfloat16):
        weight = every.view(dtype)
        assert_identical(quantize.int4(weight, 32), reference(lambda weight=weight: quantize.int4(weight, 32)))
        wrong = (~(weight.float().abs() <= 2.0**126)).sum()
        assert quantize.int8(weight).statistics.num_unusable == wrong


def test_every_fp8_code_is_rounded_as_torch_does(instruction_set: str) -> None:
    """Rows scaled by exactly one, with all codes, all midpoints and their neighbours."""
    codes = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    near = torch.cat((codes, middles, torch.nextafter(middles, codes[1:]), torch.nextafter(middles, codes[:-1])))
    row = torch.cat((near, -near)).unsqueeze(0)
    done = quantize.fp8(row)
    assert done.scale.item() == 1.0
    assert raw(done.codes) == raw(row.to(torch.float8_e4m3fn))


def test_codes_are_packed_lowest_nibble_first_along_the_input() -> None:
    weight = torch.arange(-8, 24).remainder(16).sub(8).float().unsqueeze(0) * 0.5
    done = quantize.int4(weight, 32)
    assert done.scale.abs().item() == 0.5  # found exactly: every other scale has an error
    nibbles = [(int(word) >> shift) & 15 for word in done.codes[0] for shift in range(0, 32, 4)]
    assert [(nibble - 8) * done.scale.item() for nibble in nibbles] == weight[0].tolist()
    assert done.statistics == Statistics(squared_weight=float((weight**2).sum()))


def test_int8_codes_are_bytes_and_rows_end_on_a_word() -> None:
    weight = torch.tensor([[127.0, -127.0, 1.0, 0.0, 2.0]])
    done = quantize.int8(weight)
    assert done.codes.view(torch.uint8).tolist() == [[255, 1, 129, 128, 130, 0, 0, 0]]


def test_zero_points_are_packed_along_the_output() -> None:
    zeros = torch.arange(-8, 4, dtype=torch.int8).unsqueeze(1)
    packed = quantize.pack_zero_points(zeros)
    assert packed.shape == (2, 1)
    assert [(int(packed[row // 8, 0]) >> 4 * (row % 8)) & 15 for row in range(12)] == list(range(12))
    assert int(packed[1, 0]) >> 16 == 0


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(("kind", "gain"), [("gaussian", 0.85), ("heavy", 0.90)])
def test_the_search_beats_rounding_to_the_largest(kind: str, gain: float, group: int) -> None:
    """Squared error against the largest magnitude over 7.5, which is what compressed-tensors does."""
    weight = rows_of(kind, (256, 1024), 0)
    x = weight.view(-1, group)
    scale = (x.abs().amax(1, keepdim=True) / 7.5).bfloat16().float()
    plain = float(((x - (x / scale).round().clamp(-8, 7) * scale) ** 2).sum())
    found = {search: quantize.int4(weight, group, search=search).statistics.squared_error for search in ("none", "fast", "full")}
    assert found["full"] <= found["fast"] * 1.001 < found["none"]
    assert found["full"] < gain * plain


def test_statistics_are_those_of_the_codes() -> None:
    weight = rows_of("heavy", (24, 256), 3)
    done = quantize.int4(weight, 64)
    codes = torch.stack([(done.codes >> shift) & 15 for shift in range(0, 32, 4)], dim=-1).view(24, 4, 64) - 8
    error = ((codes * done.scale.float().unsqueeze(-1)).view(24, 256) - weight).double().view(-1, 64) ** 2
    relative = error.sum(1) / (weight.double().view(-1, 64) ** 2).sum(1)
    assert done.statistics.squared_error == pytest.approx(float(error.sum()), rel=1e-5)
    assert done.statistics.worst_group == int(relative.argmax())
    assert done.statistics.worst_rms == pytest.approx(float(relative.max().sqrt()), rel=1e-5)


def test_statistics_of_blocks_add_up() -> None:
    weight = rows_of("heavy", (24, 256), 4)
    whole = quantize.int4(weight, 64)
    parts = [(start * 4, quantize.int4(weight[start : start + 8], 64).statistics) for start in (0, 8, 16)]
    summed = total(parts)
    assert summed.worst_group == whole.statistics.worst_group
    assert summed.relative_rms == pytest.approx(whole.statistics.relative_rms, rel=1e-12)


def test_what_is_not_a_number_is_counted(instruction_set: str) -> None:
    weight = torch.ones(9, 128)
    weight[2, 5], weight[2, 6], weight[8, 127], weight[0, 0] = float("nan"), float("inf"), -float("inf"), 2.0**127
    for done in (quantize.int4(weight, 32), quantize.int8(weight, 64), quantize.int8(weight), quantize.fp8(weight)):
        assert done.statistics.num_unusable == 4


def test_a_thread_that_flushes_subnormals_gets_the_same(instruction_set: str) -> None:
    weight = torch.randn(16, 128) * 1e-38
    expected = quantize.int4(weight, 32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush")
    try:
        assert_identical(quantize.int4(weight, 32), expected)
    finally:
        torch.set_flush_denormal(False)


def test_no_rows_give_no_codes() -> None:
    assert quantize.int4(torch.empty(0, 128), 32).codes.shape == (0, 16)
    assert quantize.fp8(torch.empty(0, 5)).statistics == Statistics()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: quantize.int4(torch.ones(2, 100), 32),
        lambda: quantize.int4(torch.ones(2, 256), 256),
        lambda: quantize.int8(torch.ones(2, 100), 64),
        lambda: quantize.int8(torch.ones(2, 6), 6),
        lambda: quantize.fp8(torch.ones(2, 8, dtype=torch.float64)),
        lambda: quantize.fp8(torch.ones(8)),
    ],
)
def test_what_cannot_be_packed_is_refused(wrong: Callable[[], Quantized]) -> None:
    with pytest.raises(BadInput):
        wrong()

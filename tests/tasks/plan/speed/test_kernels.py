"""Kernels one by one: against those timed alone on an H200 (docs/reference/cuda-notes.md), and against plain arithmetic."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.hardware.devices import device
from windlass.core.layout import Layout
from windlass.core.scheme import scheme
from windlass.model.families import rules
from windlass.model.families.registry import find, spec_of
from windlass.tasks.plan.engines.kernel_times import KernelTimes
from windlass.tasks.plan.engines.load import NAMES, engine
from windlass.tasks.plan.shards import ModelShards
from windlass.tasks.plan.speed.kernels import KernelModel, LayerShape, PackedMatrix, applies, items_of, layer_shapes

pytestmark = pytest.mark.pure

H200 = KernelModel(KernelTimes(), device("H200"))
QKV, OUT = PackedMatrix(14336, 4096), PackedMatrix(4096, 12288)
GATE_UP, DOWN = PackedMatrix(2816, 4096), PackedMatrix(4096, 1408)


def shapes(model: str, tp: int = 1) -> tuple[LayerShape, ...]:
    known = find(model)
    assert known is not None
    spec = spec_of(known)
    layout, how = Layout(tp=tp), scheme("int4")
    placement = ModelShards(spec, rules(spec)).placement(layout, how)
    return layer_shapes(spec, rules(spec), placement, layout, how, 0)


DENSE, AIR = shapes("GLM-4.5-Air")[:2]


@pytest.mark.parametrize(
    ("what", "predicted", "microseconds"),
    [
        ("qkv, 8 rows", H200.short(QKV, 8, cut=False), 11.4),
        ("out, 8 rows", H200.short(OUT, 8, cut=True), 10.1),
        ("gate/up, 8 rows, 53 experts", H200.streamed(53 * GATE_UP.num_bytes), 78),
        ("down, 8 rows, 53 experts", H200.streamed(53 * DOWN.num_bytes), 43),
        ("gate/up, 64 rows, 139 items", H200.streamed(139 * GATE_UP.num_bytes), 202),
        ("down, 64 rows, 139 items", H200.streamed(139 * DOWN.num_bytes), 105),
        ("qkv, 64 rows", H200.short(QKV, 64, cut=False), 20.2),
        ("out, 64 rows", H200.short(OUT, 64, cut=True), 16.1),
        ("attention, 1 x 200", H200.decode_attention(AIR, 1, 200), 6.4),
        ("attention, 8 x 200", H200.decode_attention(AIR, 8, 200), 6.9),
        ("attention, 48 x 190", H200.decode_attention(AIR, 48, 190), 12.5),
        ("attention, 128 x 190", H200.decode_attention(AIR, 128, 190), 33.9),
        ("attention, 256 x 190", H200.decode_attention(AIR, 256, 190), 64.1),
        ("attention, 64 x 600", H200.decode_attention(AIR, 64, 600), 44.2),
        ("attention, 128 x 1,150", H200.decode_attention(AIR, 128, 1150), 146),
        ("attention, 256 x 600", H200.decode_attention(AIR, 256, 600), 161),
        ("attention, 1 x 32k", H200.decode_attention(AIR, 1, 32768), 38),
        ("attention, 8 x 32k", H200.decode_attention(AIR, 8, 32768), 248),
        ("attention, 1 x 128k", H200.decode_attention(AIR, 1, 131072), 130),
        ("qkv, 2,048 rows", H200.products(QKV, 16, 128), 331),
        ("out, 2,048 rows", H200.products(OUT, 16, 128), 270),
        ("gate/up, 2,048 rows, 141 items", H200.products(GATE_UP, 141, 150), 616),
        ("down, 2,048 rows, 141 items", H200.products(DOWN, 141, 150), 380),
    ],
)
def test_kernels_timed_alone(what: str, predicted: float, microseconds: float) -> None:
    assert predicted * 1e6 == pytest.approx(microseconds, rel=0.15), what


def test_one_row_of_one_layer() -> None:
    """qkv 8.9, attention 5.5, out 9.0, router 1.5, gate/up 14.4, down 9.4 in a chain."""
    assert H200.layer(AIR, 1, 1, 200) * 1e6 == pytest.approx(48.7, rel=0.05)


def test_shapes_are_the_checkpoints() -> None:
    assert (AIR.qkv, AIR.out, AIR.gate_up, AIR.down) == (QKV, OUT, GATE_UP, DOWN)
    assert (AIR.experts, AIR.active, AIR.shared, AIR.kv_heads, AIR.head_norm) == (128, 8, 1, 8, False)
    assert (DENSE.experts, DENSE.gate_up) == (0, PackedMatrix(21888, 4096))
    assert DENSE.down.blocks == 88  # 10,944 inputs, filled up until warps divide them
    assert QKV.num_bytes == pytest.approx(30.3e6, rel=0.01)
    half = shapes("GLM-4.5-Air", tp=2)[1]
    assert (half.qkv.rows, half.out.inputs, half.kv_heads) == (7168, 6144, 4)


@given(st.integers(1, 300), st.floats(0.001, 0.9), st.integers(1, 200))
def test_items(rows: int, chance: float, item_rows: int) -> None:
    """One row an item: the mean. All rows an item: whether anybody came. Between: enough for the rows, and each but the last full."""
    touched = 1 - (1 - chance) ** rows
    assert items_of(rows, chance, 1) == pytest.approx(rows * chance, rel=1e-6)
    assert items_of(rows, chance, rows) == pytest.approx(touched, rel=1e-6)
    found = items_of(rows, chance, item_rows)
    assert max(rows * chance / item_rows, touched) * (1 - 1e-6) <= found <= (rows * chance / item_rows + touched) * (1 + 1e-6)


@pytest.mark.parametrize(
    ("model", "how", "name", "known"),
    [
        ("GLM-4.5-Air", scheme("int4"), "H200", True),
        ("GLM-4.5-Air", scheme("int4", 32), "H100-80GB", True),
        ("GLM-4.5-Air", scheme("int4"), "A100-80GB", False),
        ("GLM-4.5-Air", scheme("int4"), "B200", False),
        ("GLM-4.5-Air", scheme("int8"), "H200", False),
        ("GLM-4.5-Air", scheme("int4", kv="fp8"), "H200", True),
        ("GLM-4.5-Air", scheme("int4", zero_points=True), "H200", False),
        ("GPT-OSS-120B", scheme("int4"), "H200", False),
        ("DeepSeek-V3", scheme("int4"), "H200", False),
    ],
)
def test_who_has_kernels(model: str, how: object, name: str, known: bool) -> None:
    found = find(model)
    assert found is not None
    assert applies(spec_of(found), how, device(name)) is known  # type: ignore[arg-type]


@given(st.integers(1, 256), st.integers(1, 100_000))
def test_no_layer_beats_its_bytes(rows: int, context: int) -> None:
    """Every weight that must be read is read once at least, and every key and value."""
    touched = 128 * (1 - (1 - 8 / 128) ** rows) + 1
    read = QKV.num_bytes + OUT.num_bytes + touched * (GATE_UP.num_bytes + DOWN.num_bytes) + rows * context * 8 * 128 * 4
    assert H200.layer(AIR, rows, rows, context) > read / device("H200").measured_bandwidth


def test_slower_devices_are_slower() -> None:
    times = [
        KernelModel(KernelTimes(), device(name)).layer(AIR, rows, rows, 160)
        for rows in (1, 8, 64, 200)
        for name in ("H200", "H20")
    ]
    assert all(quick < slow for quick, slow in zip(times[::2], times[1::2], strict=True))


def test_only_the_engine_with_kernels_has_times() -> None:
    assert [name for name in NAMES if engine(name).kernel_times] == ["windlass"]
    assert msgspec.json.decode(msgspec.json.encode(KernelTimes()), type=KernelTimes) == KernelTimes()

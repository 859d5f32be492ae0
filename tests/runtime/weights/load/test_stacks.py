"""Experts read many at a time are what one by one gives, bit for bit, in fewer reads and copies; what cannot be read so is read as before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from windlass.core.layout import Layout  # noqa: E402
from windlass.core.place import place  # noqa: E402
from windlass.core.scheme import scheme  # noqa: E402
from windlass.model.formats.disk import reader  # noqa: E402
from windlass.runtime.kernels.packing.packed_rows import PackedRows  # noqa: E402
from windlass.runtime.weights import CheckpointWeights, open_model  # noqa: E402
from windlass.runtime.weights.load import quantized, stacks  # noqa: E402
from windlass.runtime.weights.load import tiled as tiling  # noqa: E402
from windlass.runtime.weights.schemes import cutting_scheme  # noqa: E402
from windlass.tasks.convert.convert import ConvertSettings, convert  # noqa: E402

pytestmark = pytest.mark.cpu

SHAPE = {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 384}
NUM_EXPERTS = 8
PARTS = (("gate", "up"), ("down",))


@pytest.fixture(scope="module")
def folder(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """int4 in groups of 64."""
    at = tmp_path_factory.mktemp("experts")
    source = tiny.make(at / "model", "qwen3_moe", **SHAPE, moe_intermediate_size=256, num_experts=NUM_EXPERTS)
    convert(source, at / "out", ConvertSettings(scheme=scheme("int4", 64), jobs=1))
    return at / "out"


@pytest.fixture
def opened(folder: Path) -> Any:
    found = open_model(folder)
    yield found
    found.store.close()


def one_by_one(weights: CheckpointWeights, *parts: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "expert_bytes", lambda *_: None)
        return weights.experts(1, *parts).data


def slices_of(num_experts: int) -> int:
    """So many experts' gate and up: 256 rows each, 256 inputs."""
    return num_experts * 2 * 256 * 256


@pytest.mark.parametrize(("at_once", "num_jobs"), [(1, 8), (3, 3), (8, 1), (100, 1)])
def test_the_same_bits_in_fewer_pieces(opened: Any, monkeypatch: pytest.MonkeyPatch, at_once: int, num_jobs: int) -> None:
    weights, repacked = CheckpointWeights(opened, tiled=True), list[int]()
    expected = one_by_one(weights, "gate", "up")
    real = tiling.repack
    monkeypatch.setattr(tiling, "repack", lambda *args, **rest: repacked.append(rest["first"]) or real(*args, **rest))
    monkeypatch.setattr(tiling, "DEVICE_SLICE_BYTES", slices_of(at_once))
    assert torch.equal(weights.experts(1, "gate", "up").data, expected)
    assert repacked == list(range(0, NUM_EXPERTS, at_once)) and len(repacked) == num_jobs


def test_an_expert_larger_than_a_slice_is_read_in_slices(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = CheckpointWeights(opened, tiled=True)
    expected = one_by_one(weights, "gate", "up")
    monkeypatch.setattr(tiling, "DEVICE_SLICE_BYTES", slices_of(1) - 1)
    monkeypatch.setattr(tiling, "read_experts", None)
    assert torch.equal(weights.experts(1, "gate", "up").data, expected)


def test_some_experts_only(opened: Any) -> None:
    weights = CheckpointWeights(opened, tiled=True)
    whole = weights.experts(1, "down").data
    assert torch.equal(weights.experts(1, "down", only=(2, 5)).data, whole[2:5])


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, ep=2)])
def test_every_rank(opened: Any, layout: Layout) -> None:
    """Gate and up are cut by rows, down by columns; or whole experts are dealt out."""
    placed = place(opened.rules, opened.spec.num_layers, layout, cutting_scheme(opened))
    for index in range(2):
        weights = CheckpointWeights(opened, placement=placed, tp_index=index, tiled=True)
        assert weights.tiled
        for parts in PARTS:
            assert torch.equal(weights.experts(1, *parts).data, one_by_one(weights, *parts)), (index, parts)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("split", [False, True])
def test_rows_for_other_gpus(opened: Any, monkeypatch: pytest.MonkeyPatch, parts: tuple[str, ...], split: bool) -> None:
    monkeypatch.setattr(quantized, "DEVICE_SLICE_BYTES", slices_of(3))
    placed = place(opened.rules, opened.spec.num_layers, Layout(tp=2), cutting_scheme(opened)) if split else None
    weights = CheckpointWeights(opened, placement=placed, tp_index=int(split))
    found = weights._expert_shards(1, parts, "weight")
    codes = weights._codes([shard for one in found for shard in one])
    assert codes is not None
    num_out, num_in = sum(shard.num_rows for shard in found[0]), found[0][0].num_in
    rows = PackedRows.allocate("int4", num_out, num_in, 64, NUM_EXPERTS, device="cpu")
    assert quantized.fill_experts(opened.store, found, codes, rows)
    panels = weights.experts(1, *parts)
    for expert in range(NUM_EXPERTS):
        assert torch.equal(rows.dense(expert), panels.dense(expert))


def test_neighbours_are_read_in_one_go(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The converter writes a layer's experts part by part: gate and up are one region, with 16 bytes of shape after each."""
    reads, real = list[int](), os.preadv
    monkeypatch.setattr(reader.os, "preadv", lambda file, buffers, at: reads.append(len(buffers)) or real(file, buffers, at))
    CheckpointWeights(opened, tiled=True).experts(1, "gate", "up")
    assert reads == [3 * 2 * NUM_EXPERTS - 1]  # codes, scales and shape of each but the last shape


@pytest.mark.parametrize("how", [scheme("int4", 32, zero_points=True), scheme("fp8")])
def test_other_formats_are_read_as_before(tiny: Any, tmp_path: Path, how: Any) -> None:
    source = tiny.make(tmp_path / "model", "qwen3_moe", **SHAPE, moe_intermediate_size=256, num_experts=2)
    convert(source, tmp_path / "out", ConvertSettings(scheme=how, jobs=1))
    found = open_model(tmp_path / "out")
    weights = CheckpointWeights(found)
    shards = weights._expert_shards(1, ("gate", "up"), "weight")
    codes = weights._codes([shard for one in shards for shard in one])
    assert codes is not None and stacks.expert_bytes(found.store, shards, codes, 2**30) is None

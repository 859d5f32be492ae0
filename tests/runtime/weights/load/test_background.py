"""Weights that arrive while the decoder is used already are those that loading one after another gives, bit for bit; a stand-in is the device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from device_side import RELAXED, StandIn  # noqa: E402

from windlass.core.scheme import scheme  # noqa: E402
from windlass.errors import BadCheckpoint  # noqa: E402
from windlass.runtime.kernels.cuda import driver, layout  # noqa: E402
from windlass.runtime.kernels.cuda.layout import Tiles  # noqa: E402
from windlass.runtime.kernels.program import loader  # noqa: E402
from windlass.runtime.nn.decoder import Decoder  # noqa: E402
from windlass.runtime.weights import CheckpointWeights, open_model  # noqa: E402
from windlass.tasks.convert.convert import ConvertSettings, convert  # noqa: E402

pytestmark = pytest.mark.skipif(not loader.available(), reason="no C++ compiler")

WIDE = {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe": WIDE | {"intermediate_size": 384, "moe_intermediate_size": 128, "n_routed_experts": 6, "n_shared_experts": 1},
    "qwen3_moe": WIDE | {"intermediate_size": 384, "moe_intermediate_size": 256, "num_experts": 4},
    "llama": WIDE | {"intermediate_size": 640, "attention_bias": False, "mlp_bias": False},
}
SMALL, MIDDLE, LARGE = 12_000, 60_000, 2**20
"""Of a buffer: a few tiles, an expert or two, everything."""


@pytest.fixture(scope="module")
def folder(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Converted to int4, in groups of 64."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            at = tmp_path_factory.mktemp(name)
            source = tiny.make(at / "model", name, **FAMILIES[name])
            convert(source, at / "out", ConvertSettings(scheme=scheme("int4", 64), jobs=1))
            made[name] = at / "out"
        return made[name]

    return make


@pytest.fixture
def opened(folder: Any) -> Iterator[Any]:
    found: list[Any] = []

    def make(name: str) -> Any:
        found.append(open_model(folder(name)))
        return found[-1]

    yield make
    for one in found:
        one.store.close()


def tensors(decoder: Decoder) -> dict[str, Any]:
    """Everything that a decoder holds, tiles too."""
    found: dict[str, Any] = dict(decoder.state_dict())
    for name, module in decoder.named_modules():
        found |= {f"{name}.{key}": value.data for key, value in vars(module).items() if isinstance(value, Tiles)}
    return found


def decoder_of(opened: Any, side: loader.DeviceSide | None, device: str = "cpu") -> Decoder:
    weights = CheckpointWeights(opened, tiled=True, dtype=torch.bfloat16, device=device)
    if side is not None:
        weights.begin(side)
    try:
        decoder = Decoder(opened.spec, weights)
        weights.finish()
    finally:
        weights.close()
    return decoder


@pytest.mark.cpu
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("slot_bytes", [SMALL, MIDDLE, LARGE])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_bits(opened: Any, name: str, slot_bytes: int, late: bool) -> None:
    model, side = opened(name), StandIn(slot_bytes, workers=3, late=late)
    expected, found = tensors(decoder_of(model, None)), tensors(decoder_of(model, side))
    assert expected.keys() == found.keys() and any(tensor.dtype is torch.uint8 for tensor in found.values())
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    assert side.num_repacked and side.num_freed == 1
    assert max(side.copies) <= slot_bytes and len(side.copies) > side.num_repacked  # embedding and head too


@pytest.mark.cpu
def test_every_thread_has_the_context_and_may_run_beside_a_capture(opened: Any) -> None:
    side = StandIn(MIDDLE, workers=3)
    decoder_of(opened("llama"), side)
    assert side.contexts == [side.context] * 3 and side.modes == [RELAXED] * 3


@pytest.mark.cpu
def test_the_shared_expert_lies_behind_the_others(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not copied there later: then it may not have arrived."""
    from windlass.runtime.nn.fused.feed_forward import _with_shared

    feed = decoder_of(opened("glm4_moe"), StandIn(LARGE)).layers[1].feed_forward
    expected = [
        torch.cat((feed.gate_up.data, feed.shared.up.weight.data)),
        torch.cat((feed.down.data, feed.shared.down.weight.data)),
    ]
    places = [feed.gate_up.data.data_ptr(), feed.down.data.data_ptr()]
    monkeypatch.setattr(torch, "cat", None)
    joined = _with_shared(feed)
    assert [one.data.data_ptr() for one in joined] == places
    assert all(torch.equal(one.data, other) for one, other in zip(joined, expected, strict=True))


@pytest.mark.cpu
def test_until_they_arrive_weights_are_zero(opened: Any) -> None:
    """What is computed with them before is finite."""
    model = opened("llama")
    weights = CheckpointWeights(model, tiled=True)
    weights.begin(side := StandIn(LARGE, workers=1, late=True))
    try:
        found = weights.matrix("layers.0.mixer.o.weight")
        assert not layout.dequantize(found).any()
        weights.finish()
        assert layout.dequantize(found).any() and side.num_repacked == 1
    finally:
        weights.close()


@pytest.mark.cpu
def test_progress_counts_what_was_read(opened: Any) -> None:
    told: list[tuple[int, int]] = []
    weights = CheckpointWeights(opened("glm4_moe"), tiled=True, progress=lambda done, total: told.append((done, total)))
    weights.begin(StandIn(MIDDLE))
    try:
        Decoder(weights.spec, weights)
        weights.finish()
    finally:
        weights.close()
    done = [count for count, _ in told]
    assert done == sorted(done) and {total for _, total in told} == {weights.total_bytes()}
    assert done[-1] == weights.total_bytes()


@pytest.mark.cpu
def test_a_file_that_has_become_shorter(folder: Any, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    for file in folder("llama").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    found = open_model(copy)
    weights_file, start = found.store.place_of("model.layers.0.mlp.down_proj.weight_packed")
    os.truncate(weights_file, start + 1000)
    weights, side = CheckpointWeights(found, tiled=True), StandIn(LARGE)  # in one piece: the first error is this one
    weights.begin(side)
    try:
        weights.matrix("layers.0.ffn.down.weight")
        with pytest.raises(BadCheckpoint, match="truncated") as error:
            weights.finish()
        assert error.value.file == str(weights_file) and error.value.offset == start + 1000
        assert side.num_freed == 1
    finally:
        weights.close()
        found.store.close()


@pytest.mark.cpu
def test_a_device_that_fails(opened: Any) -> None:
    side = StandIn(MIDDLE)
    side.fails_with = 700
    with pytest.raises(driver.CudaFailed, match="700"):
        decoder_of(opened("llama"), side)
    assert side.num_freed == 1


@pytest.mark.cpu
def test_ended_before_its_end(opened: Any) -> None:
    """Ctrl-C, or an error beside it: what has begun is waited for, the rest is left out, and nothing is written afterwards."""
    weights, side = CheckpointWeights(opened("glm4_moe"), tiled=True), StandIn(SMALL, workers=1, late=True)
    weights.begin(side)
    found = weights.experts(1, "gate", "up")
    weights.close()
    before = found.data.clone()
    assert side.num_freed == 1 and not any(side.waiting.values())
    weights.close()
    assert torch.equal(found.data, before)


@pytest.mark.cpu
@pytest.mark.parametrize("how", [scheme("int8"), scheme("bf16"), scheme("int4", 32, zero_points=True)])
def test_what_cannot_be_tiled_is_loaded_as_before(tiny: Any, tmp_path: Path, how: Any) -> None:
    source = tiny.make(tmp_path / "model", "llama", **FAMILIES["llama"])
    convert(source, tmp_path / "out", ConvertSettings(scheme=how, jobs=1))
    found, side = open_model(tmp_path / "out"), StandIn(MIDDLE)
    decoder_of(found, side)
    found.store.close()
    assert not side.copies


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("slot_bytes", [SMALL // 16 * 16, LARGE])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_bits_on_a_gpu(opened: Any, name: str, slot_bytes: int) -> None:
    model, device = opened(name), torch.device("cuda")
    expected = tensors(decoder_of(model, None, "cuda"))
    found = tensors(decoder_of(model, loader.CudaSide(device, 3, slot_bytes), "cuda"))
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key

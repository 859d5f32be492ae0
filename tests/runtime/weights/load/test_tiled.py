"""Tiles hold exactly what a converted checkpoint's codes and scales say; whatever they cannot hold is loaded as if nobody had asked for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

from windlass.core.model import MoE  # noqa: E402
from windlass.core.scheme import Scheme, scheme  # noqa: E402
from windlass.model.families import describe  # noqa: E402
from windlass.runtime.kernels.cuda.layout import Tiles, dequantize  # noqa: E402
from windlass.runtime.kernels.packing.panels import Panels  # noqa: E402
from windlass.runtime.weights import CheckpointWeights, RandomWeights, open_model  # noqa: E402
from windlass.runtime.weights.load import tiled as tiling  # noqa: E402
from windlass.runtime.weights.tensors.storage_format import CodeFormat  # noqa: E402
from windlass.tasks.convert.convert import ConvertSettings, convert  # noqa: E402

pytestmark = pytest.mark.cpu

WIDE = {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe": WIDE | {"intermediate_size": 384, "moe_intermediate_size": 128, "n_routed_experts": 4, "n_shared_experts": 1},
    "qwen3_moe": WIDE | {"intermediate_size": 384, "moe_intermediate_size": 256, "num_experts": 4},
    "llama": WIDE | {"intermediate_size": 640, "attention_bias": False, "mlp_bias": False},
}


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a matrix comes in many."""
    monkeypatch.setattr(tiling, "DEVICE_SLICE_BYTES", 2**13)


@pytest.fixture
def made(tiny: Any, tmp_path: Path) -> Any:
    """A tiny checkpoint of a family, converted."""

    def make(name: str, how: Scheme, **changes: Any) -> Any:
        source = tiny.make(tmp_path / "model", name, **(FAMILIES[name] | changes))
        convert(source, tmp_path / "out", ConvertSettings(scheme=how, jobs=1))
        return open_model(tmp_path / "out")

    return make


def same(found: Any, expected: Any) -> bool:
    """`found` tiles of one matrix or of experts, `expected` fp32 of the same."""
    assert isinstance(found, Tiles)
    values = dequantize(found)
    return torch.equal(values if expected.dim() == 3 else values[0], expected)


def has_shared(layer: int, opened: Any) -> bool:
    return bool(getattr(opened.spec.layers[layer].feed_forward, "shared_intermediate_size", 0))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("name", FAMILIES)
def test_tiles_are_what_the_checkpoint_says(made: Any, name: str, group: int) -> None:
    opened = made(name, scheme("int4", group))
    weights, exact = CheckpointWeights(opened, tiled=True), CheckpointWeights(opened, keep_quantized=False)
    assert weights.tiled
    for layer, described in enumerate(opened.spec.layers):
        at, is_routed = f"layers.{layer}", isinstance(described.feed_forward, MoE)
        matrices = [[f"{at}.mixer.{part}.weight" for part in "qkv"], [f"{at}.mixer.o.weight"]]
        for feed in [f"{at}.ffn"] * (not is_routed) + [f"{at}.ffn.shared"] * has_shared(layer, opened):
            matrices += [[f"{feed}.gate.weight", f"{feed}.up.weight"], [f"{feed}.down.weight"]]
        for names in matrices:
            found = weights.matrix(*names)
            assert same(found, exact.matrix(*names)), names
            assert (found.group, found.paired) == (group, "gate" in names[0])
        if is_routed:
            for parts in (("gate", "up"), ("down",)):
                found = weights.experts(layer, *parts)
                assert same(found, exact.experts(layer, *parts)), parts
                assert found.num_matrices == 4 and found.paired == (len(parts) == 2)
            router = weights.matrix(f"{at}.ffn.router.weight")
            assert not isinstance(router, Tiles | Panels) and torch.equal(router.float(), exact.matrix(f"{at}.ffn.router.weight"))
    for outside in ("embed.weight", "head.weight"):
        assert torch.equal(weights.matrix(outside).float(), exact.matrix(outside))


def test_a_pair_lies_as_the_kernels_want_it(made: Any) -> None:
    """Rows of gate and up by eights, in turn."""
    opened = made("llama", scheme("int4", 64))
    weights = CheckpointWeights(opened, tiled=True)
    names = [f"layers.0.ffn.{part}.weight" for part in ("gate", "up")]
    both = weights.matrix(*names)
    plain = Tiles(both.data, both.rows, both.inputs, both.group, paired=False)
    gate, up = (weights.matrix(name) for name in names)
    rows = dequantize(plain)[0].view(-1, 2, 8, 256)
    assert torch.equal(rows[:, 0].flatten(0, 1), dequantize(gate)[0])
    assert torch.equal(rows[:, 1].flatten(0, 1), dequantize(up)[0])


@pytest.mark.parametrize(
    ("how", "changes"),
    [
        (scheme("int4", 32, zero_points=True), {}),
        (scheme("int8"), {}),
        (scheme("bf16"), {}),
        (scheme("int4", 64), {"head_dim": 20, "num_attention_heads": 16, "num_key_value_heads": 2}),  # k and v have 40 rows
        (scheme("int4", 128), {"intermediate_size": 336}),  # kept in 16 bits
    ],
)
def test_what_cannot_be_tiled_is_loaded_as_before(made: Any, how: Scheme, changes: dict[str, Any]) -> None:
    opened = made("llama", how, **changes)
    asked, plain = CheckpointWeights(opened, tiled=True), CheckpointWeights(opened)
    assert not asked.tiled
    for names in (
        ("layers.1.mixer.q.weight", "layers.1.mixer.k.weight", "layers.1.mixer.v.weight"),
        ("layers.0.ffn.down.weight",),
    ):
        one, other = asked.matrix(*names), plain.matrix(*names)
        assert type(one) is type(other) and not isinstance(one, Tiles)
        assert torch.equal(getattr(one, "data", one), getattr(other, "data", other))
    assert asked.memory_bytes() == plain.memory_bytes()


def test_forms() -> None:
    codes = CodeFormat(kind="int4", group=64, scale="BF16")
    assert tiling.can_tile(codes, 32, 256) and tiling.can_tile(CodeFormat(kind="int4", group=0, scale="BF16"), 16, 128)
    assert not tiling.can_tile(None, 32, 256)
    assert not tiling.can_tile(codes, 40, 256)
    assert not tiling.can_tile(codes, 32, 96)
    for kind, group, scale in (
        ("int4", 64, "F16"),
        ("int4", 0, "BF16"),
        ("int4", 16, "BF16"),
        ("int8", 64, "BF16"),
        ("int4_zeros", 64, "BF16"),
    ):
        assert not tiling.can_tile(CodeFormat(kind=kind, group=group, scale=scale), 32, 256)


def test_one_layer_that_cannot_be_tiled_is_enough(made: Any) -> None:
    opened = made("llama", scheme("int4", 64))
    assert CheckpointWeights(opened, tiled=True).tiled
    assert not CheckpointWeights(opened, tiled=True, keep_quantized=False).tiled
    forms = tiling.can_tile

    def but_one(codes: Any, num_out: int, num_in: int) -> bool:
        return forms(codes, num_out, num_in) and num_in != 640

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("windlass.runtime.weights.load.checkpoint.can_tile", but_one)
        assert not CheckpointWeights(opened, tiled=True).tiled


def test_a_head_in_four_bits_stays_plain(made: Any, tiny: Any) -> None:
    """Those kernels multiply the head's 16 bits."""
    how = msgspec.structs.replace(scheme("int4", 64), quantize_head=True)
    opened = made("llama", how)
    weights, exact = CheckpointWeights(opened, tiled=True), CheckpointWeights(opened, keep_quantized=False)
    assert weights.tiled and isinstance(CheckpointWeights(opened).matrix("head.weight"), Panels)
    assert torch.equal(weights.matrix("head.weight").float(), exact.matrix("head.weight").to(torch.bfloat16).float())
    drawn = RandomWeights(opened.spec, opened.rules, quant=how, tiled=True)
    assert drawn.tiled and isinstance(drawn.matrix("layers.0.mixer.o.weight"), Tiles)
    assert not isinstance(drawn.matrix("head.weight"), Tiles)


def test_progress_counts_every_byte_once(made: Any, tmp_path: Path) -> None:
    opened, told = made("glm4_moe", scheme("int4", 64)), []
    weights = CheckpointWeights(opened, tiled=True, progress=lambda done, total: told.append((done, total)))
    total = weights.total_bytes()
    assert told == [(0, total)]
    for _ in range(2):  # what is asked for twice is counted once
        for layer, described in enumerate(opened.spec.layers):
            at = f"layers.{layer}"
            weights.matrix(*(f"{at}.mixer.{part}.weight" for part in "qkv")), weights.matrix(f"{at}.mixer.o.weight")
            weights.vector(*(f"{at}.mixer.{part}.bias" for part in "qkv"))
            for norm in ("mixer_norm", "ffn_norm", "mixer.q_norm", "mixer.k_norm"):
                weights.vector(f"{at}.{norm}.weight")
            feed = f"{at}.ffn"
            if isinstance(described.feed_forward, MoE):
                weights.experts(layer, "gate", "up"), weights.experts(layer, "down")
                weights.matrix(f"{at}.ffn.router.weight"), weights.vector(f"{at}.ffn.router.correction")
                feed = f"{at}.ffn.shared"
            weights.matrix(f"{feed}.gate.weight", f"{feed}.up.weight"), weights.matrix(f"{feed}.down.weight")
        for name in ("embed.weight", "head.weight"):
            weights.matrix(name)
        weights.vector("norm.weight")
    done = [count for count, _ in told]
    assert done == sorted(done) and done[-1] == total
    assert {whole for _, whole in told} == {total}
    files = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert 0.9 * files < total < files  # which have headers too


def test_inputs_that_the_group_does_not_divide_have_smaller_ones(made: Any) -> None:
    opened = made("llama", scheme("int4", 128), intermediate_size=320)
    weights, exact = CheckpointWeights(opened, tiled=True), CheckpointWeights(opened, keep_quantized=False)
    down = weights.matrix("layers.0.ffn.down.weight")
    assert weights.tiled and (down.group, down.inputs, down.width) == (64, 320, 384)
    assert same(down, exact.matrix("layers.0.ffn.down.weight"))


def test_random_tiles_as_conversion_would_make_them(tiny: Any) -> None:
    config = tiny.config("glm4_moe", **FAMILIES["glm4_moe"])
    made = tiny.rules(config)
    spec = describe(config)
    weights = RandomWeights(spec, made, quant=scheme("int4", 64), tiled=True)
    assert weights.tiled
    gate_up = weights.experts(1, "gate", "up")
    assert (gate_up.num_matrices, gate_up.rows, gate_up.inputs, gate_up.group, gate_up.paired) == (4, 256, 256, 64, True)
    assert dequantize(gate_up).std().item() == pytest.approx(256**-0.5, rel=0.05)
    assert isinstance(weights.matrix("layers.0.ffn.down.weight"), Tiles)
    assert not isinstance(weights.matrix("layers.1.ffn.router.weight"), Tiles)
    for how in (scheme("int8"), scheme("int4", 64, zero_points=True), scheme("bf16")):
        assert not RandomWeights(spec, made, quant=how, tiled=True).tiled

"""What is loaded equals what the files hold, for every format and layout: exactly where codes or types are kept, and in fp32 always."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from windlass.core.ggml.forms import FORMS  # noqa: E402
from windlass.core.model import MoE  # noqa: E402
from windlass.core.rule import ModelPart  # noqa: E402
from windlass.core.scheme import scheme  # noqa: E402
from windlass.runtime.kernels.ops.linear import linear  # noqa: E402
from windlass.runtime.kernels.packing.matrix import StackedMatrix  # noqa: E402
from windlass.runtime.kernels.packing.packed_rows import PackedRows  # noqa: E402
from windlass.runtime.kernels.packing.panels import Panels  # noqa: E402
from windlass.runtime.weights import CheckpointWeights, OpenedModel, open_model  # noqa: E402
from windlass.runtime.weights.load.quantized import packed_bytes  # noqa: E402
from windlass.runtime.weights.tensors.readers import ModelTensor, reader  # noqa: E402
from windlass.runtime.weights.tensors.storage_format import CodeFormat  # noqa: E402
from windlass.tasks.convert.convert import ConvertSettings, convert  # noqa: E402

pytestmark = pytest.mark.cpu

_found = importlib.util.spec_from_file_location(
    "ggml_blocks", Path(__file__).parents[3] / "runtime" / "kernels" / "ggml_blocks.py"
)
assert _found is not None and _found.loader is not None
GGML_BLOCKS = importlib.util.module_from_spec(_found)
_found.loader.exec_module(GGML_BLOCKS)
FAMILIES = sorted(
    file.stem
    for file in (Path(__file__).parents[3] / "model" / "families" / "tiny").glob("*.json")
    if file.stem not in ("evo2", "glm_moe_dsa")
)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def plain(found: Any, expert: int | None = None) -> torch.Tensor:
    if isinstance(found, Panels):
        return found.dense(expert)
    return found if expert is None else found[expert]


def names_of(opened: OpenedModel) -> Iterator[tuple[str, ModelTensor]]:
    """Every tensor of the main part by our name."""
    for rule in opened.rules:
        if rule.part is ModelPart.MAIN and rule.copy_of is None:
            for layer in rule.layers if rule.layers is not None else (None,):
                for expert in range(rule.num_experts) if rule.num_experts else (None,):
                    ours = ModelTensor(rule=rule, layer=layer, expert=expert)
                    yield ours.name, ours


def rows_read(opened: OpenedModel, ours: ModelTensor) -> torch.Tensor:
    """The tensor as numbers, by the reader that conversion uses too."""
    return reader(opened.store, ours, opened.locations[ours.name])(0, ours.shape[0]).reshape(ours.shape)


# --- Hugging Face directories


@pytest.mark.parametrize("name", FAMILIES)
def test_plain_tensors_stay_in_their_type(tiny: Any, tmp_path: Path, name: str) -> None:
    config = tiny.config(name)
    made = tiny.rules(config)
    values = tiny.values(made)
    opened = open_model(tiny.write(tmp_path / name, config, tiny.stored(made, values, 2)))  # 2: plain where there is a choice
    weights = CheckpointWeights(opened)
    assert not [ours for ours, _, _ in values if ours not in {rule.ours for rule in opened.rules}]
    for full, ours in names_of(opened):
        value = values[ours.rule.ours, ours.layer, ours.expert]
        if value.dim() == 1:
            assert weights.vector(full).dtype is torch.float32 and torch.equal(weights.vector(full), value.float()), full
        else:
            assert weights.matrix(full).dtype is value.dtype and torch.equal(weights.matrix(full), value), full
    opened.store.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_plain_type(tiny: Any, tmp_path: Path, dtype: str) -> None:
    opened = open_model(tiny.make(tmp_path / "model", "chatglm", dtype=dtype))
    kept, exact = CheckpointWeights(opened), CheckpointWeights(opened, keep_quantized=False)
    names = [f"layers.0.mixer.{part}.weight" for part in "qkv"]
    assert kept.matrix(*names).dtype is DTYPES[dtype]
    assert exact.matrix(*names).dtype is torch.float32
    assert torch.equal(kept.matrix(*names).float(), exact.matrix(*names))


def test_a_pickle_is_read(tiny: Any, tmp_path: Path) -> None:
    config = tiny.config("gpt_neox")
    made = tiny.rules(config)
    values = tiny.values(made)
    tmp_path.joinpath("config.json").write_text(json.dumps(config))
    torch.save(tiny.stored(made, values), tmp_path / "pytorch_model.bin")
    weights = CheckpointWeights(open_model(tmp_path))
    for part in "qkv":
        expected = values[f"layers.{{layer}}.mixer.{part}.weight", 1, None]
        assert torch.equal(weights.matrix(f"layers.1.mixer.{part}.weight"), expected)


def test_unlike_types_are_stacked_in_the_wider(tiny: Any, tmp_path: Path) -> None:
    config = tiny.config("mistral")
    made = tiny.rules(config)
    values = tiny.values(made)
    stored = tiny.stored(made, values)
    stored["model.layers.0.self_attn.k_proj.weight"] = stored["model.layers.0.self_attn.k_proj.weight"].to(torch.float16)
    weights = CheckpointWeights(open_model(tiny.write(tmp_path / "model", config, stored)))
    names = [f"layers.0.mixer.{part}.weight" for part in "qkv"]
    expected = [values[f"layers.{{layer}}.mixer.{part}.weight", 0, None].float() for part in "qkv"]
    expected[1] = expected[1].half().float()
    assert weights.matrix(*names).dtype is torch.float32
    assert torch.equal(weights.matrix(*names), torch.cat(expected))
    assert weights.matrix("layers.1.mixer.q.weight", "layers.1.mixer.k.weight").dtype is torch.bfloat16


# --- published in 8 and 4 bits


def test_mxfp4_is_kept_exactly(tiny: Any, tmp_path: Path) -> None:
    config = tiny.config("gpt_oss")
    made = tiny.rules(config)
    values = tiny.values(made)
    opened = open_model(tiny.write(tmp_path / "model", config, tiny.stored(made, values)))
    kept, exact = CheckpointWeights(opened), CheckpointWeights(opened, keep_quantized=False)
    for parts in (("gate", "up"), ("down",)):
        panels, numbers, biases = kept.experts(0, *parts), exact.experts(0, *parts), kept.expert_vectors(0, *parts)
        assert isinstance(panels, Panels) and panels.kind == "int8" and panels.num_experts == len(numbers)
        for expert in range(len(numbers)):
            expected = [values[f"layers.{{layer}}.ffn.experts.{{expert}}.{part}.weight", 0, expert] for part in parts]
            bias = [values[f"layers.{{layer}}.ffn.experts.{{expert}}.{part}.bias", 0, expert] for part in parts]
            assert torch.equal(numbers[expert], torch.cat(expected).float())
            assert torch.equal(panels.dense(expert), numbers[expert])
            assert torch.equal(biases[expert], torch.cat(bias).float())


@pytest.mark.parametrize("how", ["blocks", "rows", "tensor", "int8"])
@pytest.mark.parametrize("name", ["deepseek_v3", "glm4"])
def test_eight_bits_are_kept_exactly(tiny: Any, tmp_path: Path, name: str, how: str) -> None:
    """fp8 with scales for 128 x 128, for a row or for all; signed bytes with a scale for a row."""
    config = tiny.config(name, hidden_size=256, intermediate_size=384)
    made = tiny.rules(config)
    stored = tiny.stored(made, tiny.values(made))
    packed = [tensor for tensor in stored if tensor.endswith("proj.weight") and "layers.0." in tensor]
    for tensor in packed:
        rows, inputs = stored[tensor].shape
        if how == "int8":
            stored[tensor] = torch.randint(-128, 128, (rows, inputs), dtype=torch.int8)
        else:
            stored[tensor] = (stored[tensor].float() * 1000).to(torch.float8_e4m3fn)
        shape = {"blocks": (-(-rows // 128), -(-inputs // 128)), "tensor": (1,)}.get(how, (rows, 1))
        stored[f"{tensor}{'_scale_inv' if how == 'blocks' else '_scale'}"] = torch.rand(shape) + 0.1
    opened = open_model(tiny.write(tmp_path / "model", config, stored))
    kept, exact = CheckpointWeights(opened), CheckpointWeights(opened, keep_quantized=False)
    seen = 0
    for full, ours in names_of(opened):
        if opened.locations[full].name in packed:
            found = kept.matrix(full)
            assert torch.equal(exact.matrix(full), rows_read(opened, ours)), full
            whole = ours.shape[1] % (128 if how == "blocks" else 32) == 0
            assert isinstance(found, Panels) == whole, full
            assert torch.equal(plain(found), exact.matrix(full) if whole else exact.matrix(full).bfloat16()), full
            seen += 1
    assert seen >= 6


# --- what `windlass convert` writes

SCHEMES = {
    "int4-32": scheme("int4", 32),
    "int4-128": scheme("int4", 128),
    "int4-zeros": scheme("int4", 32, zero_points=True),
    "int8": scheme("int8"),
    "fp8": scheme("fp8"),
    "bf16": scheme("bf16"),
}


def check_converted(tiny: Any, source: Path, folder: Path, quant: str) -> dict[str, int]:
    convert(source, folder, ConvertSettings(scheme=SCHEMES[quant], jobs=1))
    opened = open_model(folder)
    written = tiny.read(folder)
    kept, exact = CheckpointWeights(opened), CheckpointWeights(opened, keep_quantized=False)
    kinds: dict[str, int] = {}
    for full, ours in names_of(opened):
        place = opened.locations[full]
        if len(ours.shape) == 1:
            assert torch.equal(kept.vector(full), exact.vector(full)), full
            continue
        whole, how = written.matrix(place.name)
        whole = whole.t() if place.transposed else whole
        rows = place.source.rows
        expected = whole if rows is None else whole[[rows.stored(row) for row in range(ours.shape[0])]]
        assert torch.equal(exact.matrix(full), expected.float()), full
        found = kept.matrix(full)
        kind = found.kind if isinstance(found, Panels) else str(found.dtype)
        kinds[kind] = kinds.get(kind, 0) + 1
        if isinstance(found, Panels) or how is None:
            assert torch.equal(plain(found).float(), expected.float()), full
        else:  # rows that are no whole blocks of 32 have no panels
            assert ours.shape[1] % 32 and torch.equal(found, expected.bfloat16()), full
    opened.store.close()
    return kinds


@pytest.mark.parametrize("name", ["glm4_moe", "gpt2", "gpt_oss", "chatglm", "falcon-40b", "deepseek_v3", "llama-tied"])
def test_converted_families(tiny: Any, tmp_path: Path, name: str) -> None:
    kinds = check_converted(tiny, tiny.make(tmp_path / name, name), tmp_path / "out", "int4-32")
    assert kinds["int4"] >= 6


@pytest.mark.parametrize("quant", [quant for quant in SCHEMES if quant != "int4-32"])
@pytest.mark.parametrize("name", ["glm4_moe", "gpt2"])
def test_converted_schemes(tiny: Any, tmp_path: Path, name: str, quant: str) -> None:
    kinds = check_converted(tiny, tiny.make(tmp_path / name, name), tmp_path / "out", quant)
    expected = {"int4-zeros": "int4_zeros", "int4-128": "int4", "bf16": "torch.bfloat16"}.get(quant, quant)
    assert kinds[expected] >= 6


def test_converted_experts_are_one_stack_of_panels(tiny: Any, tmp_path: Path) -> None:
    convert(tiny.make(tmp_path / "model", "glm4_moe"), tmp_path / "out", ConvertSettings(scheme=scheme("int4", 32), jobs=1))
    opened = open_model(tmp_path / "out")
    weights, exact = CheckpointWeights(opened), CheckpointWeights(opened, keep_quantized=False)
    layer = next(index for index, one in enumerate(opened.spec.layers) if isinstance(one.feed_forward, MoE))
    for parts in (("gate", "up"), ("down",)):
        panels, numbers = weights.experts(layer, *parts), exact.experts(layer, *parts)
        assert isinstance(panels, Panels) and panels.shape == tuple(numbers.shape[1:])
        for expert in range(len(numbers)):
            assert torch.equal(panels.dense(expert), numbers[expert])


def test_a_dense_matrix_is_had_of_anything(tiny: Any, tmp_path: Path) -> None:
    convert(tiny.make(tmp_path / "model", "deepseek_v3"), tmp_path / "out", ConvertSettings(scheme=scheme("int4", 32), jobs=1))
    opened = open_model(tmp_path / "out")
    weights, exact = CheckpointWeights(opened), CheckpointWeights(opened, keep_quantized=False)
    name = "layers.0.mixer.kv_b.weight"
    assert isinstance(weights.matrix(name), Panels)
    assert torch.equal(weights.dense_matrix(name), exact.matrix(name).bfloat16())
    assert torch.equal(exact.dense_matrix(name), exact.matrix(name))


# --- GGUF and .m

GGUF_KINDS = {
    "F32": "torch.float32",
    "F16": "torch.float16",
    "BF16": "torch.bfloat16",
    "Q4_0": "int4",
    "Q4_1": "int4_minima",
    "Q8_0": "int8",
    "Q5_0": "q5_0",
    "Q5_1": "q5_1",
}


def check_blocks(opened: OpenedModel, kind: str) -> None:
    kept, exact = CheckpointWeights(opened), CheckpointWeights(opened, keep_quantized=False)
    kinds: set[str] = set()
    for full, ours in names_of(opened):
        read = rows_read(opened, ours)
        if len(ours.shape) == 1:
            assert torch.equal(kept.vector(full), read), full
            continue
        found = kept.matrix(full)
        assert torch.equal(exact.matrix(full), read), full
        if isinstance(found, Panels):
            assert torch.equal(found.dense(), read), full
            kinds.add(found.kind)
        else:
            assert torch.equal(found, read.to(found.dtype)), full
            kinds.add(str(found.dtype))
    assert kind in kinds


@pytest.mark.parametrize("kind", GGUF_KINDS)
@pytest.mark.parametrize("name", ["llama", "glm4moe"])
def test_gguf(gguf_maker: ModuleType, tmp_path: Path, name: str, kind: str) -> None:
    config = gguf_maker.small_config(name)
    file = gguf_maker.write_gguf(tmp_path / "model.gguf", name, config, gguf_maker.expected_tensors(config), kind=kind)
    check_blocks(open_model(file), GGUF_KINDS[kind])


def random_blocks(kind: str, shape: tuple[int, ...]) -> Any:
    """Bytes at random but for the block's fp16 numbers."""
    rows = GGML_BLOCKS.random_rows(kind.lower(), prod(shape[:-1]), shape[-1] // 256, seed=4, size=0.01)
    return rows.view(*shape[:-1], -1).numpy()


@pytest.mark.parametrize("kind", [kind.upper() for kind, form in FORMS.items() if form.elements == 256])
def test_gguf_of_256(gguf_maker: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    config = gguf_maker.small_config("qwen3") | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    original = gguf.quantize

    def quantize(data: Any, type_: Any) -> Any:
        return random_blocks(kind, data.shape) if type_.name == kind else original(data, type_)

    monkeypatch.setattr(gguf, "quantize", quantize)
    file = gguf_maker.write_gguf(tmp_path / "model.gguf", "qwen3", config, gguf_maker.expected_tensors(config), kind=kind)
    check_blocks(open_model(file), kind.lower())


def test_parts_in_unlike_blocks_are_stacked(gguf_maker: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As llama.cpp mixes them: Q in one kind, V in another."""
    gguf = pytest.importorskip("gguf")
    config = gguf_maker.small_config("qwen3")
    original = gguf.GGUFWriter.add_tensor

    def add_tensor(self: Any, name: str, data: Any, raw_dtype: Any = None) -> None:
        if "attn_v.weight" in name:
            values = gguf.quants.dequantize(data, raw_dtype)
            raw_dtype = gguf.GGMLQuantizationType.Q8_0
            data = gguf.quantize(values, raw_dtype)
        original(self, name, data, raw_dtype=raw_dtype)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_tensor)
    file = gguf_maker.write_gguf(tmp_path / "model.gguf", "qwen3", config, gguf_maker.expected_tensors(config), kind="Q4_1")
    opened = open_model(file)
    weights, exact = CheckpointWeights(opened), CheckpointWeights(opened, keep_quantized=False)
    names = [f"layers.0.mixer.{part}.weight" for part in "qkv"]
    assert weights.storage().keys() >= {"Q4_1", "Q8_0", "F32"}
    stacked = weights.matrix(*names)
    assert isinstance(stacked, StackedMatrix)
    assert [(part.kind, part.shape) for part in stacked.parts] == [("int4_minima", (192, 64)), ("int8", (64, 64))]
    assert torch.equal(torch.cat([part.dense() for part in stacked.parts]), exact.matrix(*names))
    x, bias, add = torch.randn(5, 64), torch.randn(256), torch.randn(5, 256)
    expected = torch.cat([linear(x, part) for part in stacked.parts], dim=1) + bias + add
    torch.testing.assert_close(linear(x, stacked, bias, add), expected)
    assert torch.equal(weights.matrix(*names[:2]).dense(), exact.matrix(*names[:2]))


@pytest.mark.parametrize("kind", FORMS)
def test_memory_is_as_said(kind: str) -> None:
    """In panels on a CPU; without their padding on a GPU, where it is the file's own size, but for six-bit scales."""
    form = FORMS[kind]
    codes = CodeFormat(kind=kind, group=form.elements, scale="F16")
    made = Panels.allocate(kind, 20, 2 * form.elements, form.elements, scale_dtype=torch.float16)
    rows = PackedRows.allocate(kind, 20, 2 * form.elements, form.elements, scale_dtype=torch.float16, device="cpu")
    assert packed_bytes(codes, 20, 2 * form.elements, torch.device("cpu")) == made.num_bytes
    assert packed_bytes(codes, 20, 2 * form.elements, torch.device("cuda")) == rows.num_bytes == 40 * form.num_bytes


@pytest.mark.parametrize("kind", ["f32", "f16", "q80", "q40"])
@pytest.mark.parametrize("name", ["llama-tied", "qwen3_moe", "glm4_moe"])
def test_dllama(dllama_maker: ModuleType, tmp_path: Path, name: str, kind: str) -> None:
    dllama_maker._write(tmp_path / "model.m", dllama_maker.CONFIGS[name], kind)
    held = {"f32": "torch.float32", "f16": "torch.float16", "q80": "int8", "q40": "int4"}[kind]
    check_blocks(open_model(tmp_path / "model.m"), held)


def test_smollm2(smollm2: Path) -> None:
    """The published file: Q4_1 in panels, its table in Q8_0, and both the file's own numbers."""
    opened = open_model(smollm2)
    kept, exact = CheckpointWeights(opened), CheckpointWeights(opened, keep_quantized=False)
    assert kept.storage().keys() == {"Q4_1", "Q8_0", "F32"}
    for layer in (0, 29):
        names = [f"layers.{layer}.mixer.{part}.weight" for part in "qkv"]
        panels = kept.matrix(*names)
        assert (panels.kind, panels.group, panels.shape) == ("int4_minima", 32, (960, 576))
        assert torch.equal(panels.dense(), exact.matrix(*names))
    table = kept.matrix("embed.weight")
    assert table is kept.matrix("head.weight") and table.kind == "int8"
    rows = torch.tensor([0, 1, 7, 4093, 49151])
    assert torch.equal(table.rows(rows), exact.matrix("embed.weight")[rows])

"""Quantizing while loading gives what `windlass convert` and then loading gives, to the last bit, for every family."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from windlass.core.layout import Layout  # noqa: E402
from windlass.core.place import place  # noqa: E402
from windlass.core.scheme import scheme  # noqa: E402
from windlass.errors import BadCheckpoint, BadInput  # noqa: E402
from windlass.runtime.kernels.packing.panels import Panels  # noqa: E402
from windlass.runtime.nn import Decoder  # noqa: E402
from windlass.runtime.weights.load.checkpoint import CheckpointWeights  # noqa: E402
from windlass.runtime.weights.load.quantizing import quantized  # noqa: E402
from windlass.runtime.weights.schemes import cutting_scheme  # noqa: E402
from windlass.runtime.weights.source import open_model  # noqa: E402
from windlass.tasks.convert.convert import ConvertSettings, convert  # noqa: E402

pytestmark = pytest.mark.cpu

FAMILIES = (
    "bloom",
    "chatglm",
    "deepseek_v3",
    "falcon-7b",
    "glm4_moe",
    "gpt2",
    "gpt_neox",
    "llama",
    "llama-tied",
    "mixtral",
    "qwen3_moe",
)


def tensors(decoder: Decoder) -> Iterator[tuple[str, Any]]:
    """Every tensor of a decoder, packed or not."""
    for name, module in decoder.named_modules():
        own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False)), **vars(module)}
        for key, value in own.items():
            if isinstance(value, Panels):
                yield f"{name}.{key} {value.kind} {value.shape} {value.group}", value.data
            elif isinstance(value, torch.Tensor):
                yield f"{name}.{key} {value.dtype}", value


def loaded(opened: Any, **options: Any) -> dict[str, Any]:
    try:
        return dict(tensors(Decoder(opened.spec, CheckpointWeights(opened, **options))))
    finally:
        opened.store.close()


def same(one: Any, other: Any) -> bool:
    return one.dtype == other.dtype and bool(torch.equal(one, other))


@pytest.mark.parametrize("how", ["int4", "int8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_equals_converting_and_loading(name: str, how: str, tiny: Any, tmp_path: Path) -> None:
    source = tiny.make(tmp_path / "source", name)
    convert(source, tmp_path / how, ConvertSettings(scheme=scheme(how)))
    expected, found = loaded(open_model(tmp_path / how)), loaded(quantized(open_model(source), how))
    assert found.keys() == expected.keys()
    assert any("int" in key for key in found), "something is quantized"
    assert [key for key in found if not same(found[key], expected[key])] == []


def test_equals_it_from_fp32_too(tiny: Any, tmp_path: Path) -> None:
    source = tiny.make(tmp_path / "source", "glm4_moe", dtype="float32")
    convert(source, tmp_path / "int4", ConvertSettings(scheme=scheme("int4")))
    expected, found = loaded(open_model(tmp_path / "int4")), loaded(quantized(open_model(source), "int4"))
    assert found.keys() == expected.keys()
    assert [key for key in found if not same(found[key], expected[key])] == []


@pytest.mark.parametrize("name", ["llama", "glm4_moe"])
def test_equals_it_on_every_rank(name: str, tiny: Any, tmp_path: Path) -> None:
    source = tiny.make(tmp_path / "source", name)
    convert(source, tmp_path / "int4", ConvertSettings(scheme=scheme("int4")))
    for index in range(2):
        parts: list[dict[str, Any]] = []
        for path, how in ((tmp_path / "int4", None), (source, "int4")):
            opened = quantized(open_model(path), how)
            cut = place(opened.rules, opened.spec.num_layers, Layout(tp=2), cutting_scheme(opened))
            weights = CheckpointWeights(opened, placement=cut, tp_index=index)
            names = [f"layers.1.mixer.{part}.weight" for part in "qkv"]
            parts.append({"qkv": weights.matrix(*names), "o": weights.matrix("layers.1.mixer.o.weight")})
            opened.store.close()
        for key in ("qkv", "o"):
            one, other = parts[0][key], parts[1][key]
            assert one.shape == other.shape and same(getattr(one, "data", one), getattr(other, "data", other))


def test_refuses_what_is_quantized_already(tiny: Any, tmp_path: Path) -> None:
    source = tiny.make(tmp_path / "source", "llama")
    convert(source, tmp_path / "int8", ConvertSettings(scheme=scheme("int8")))
    opened = open_model(tmp_path / "int8")
    with pytest.raises(BadInput, match="is quantized already; leave --quant out"):
        quantized(opened, "int4")
    opened.store.close()


def test_a_damaged_source_is_named(tiny: Any, tmp_path: Path) -> None:
    config = tiny.config("llama")
    values = tiny.values(tiny.rules(config))
    key = next(key for key in values if key[0] == "layers.{layer}.mixer.o.weight")
    values[key][3, 5] = float("nan")
    folder = tiny.write(tmp_path / "source", config, tiny.stored(tiny.rules(config), values))
    opened = quantized(open_model(folder), "int4")
    with pytest.raises(BadCheckpoint, match=r"o_proj.*NaN"):
        CheckpointWeights(opened).matrix("layers.0.mixer.o.weight")
    opened.store.close()


def test_counts_memory_as_it_will_be(tiny: Any, tmp_path: Path) -> None:
    source = tiny.make(tmp_path / "source", "glm4_moe")
    convert(source, tmp_path / "int4", ConvertSettings(scheme=scheme("int4")))
    counts = [
        CheckpointWeights(quantized(open_model(path), how)).memory_bytes()
        for path, how in ((tmp_path / "int4", None), (source, "int4"))
    ]
    assert counts[0] == counts[1]

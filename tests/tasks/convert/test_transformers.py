"""What conversion writes is what transformers and the compressed-tensors package read, down to the logits.

Compared with the same model holding weights that we unpacked ourselves. In bf16 int4 and int8 are equal to the bit: one product,
rounded once. Where transformers rounds more than we do, it shows: it unpacks int experts in the scale's bf16 even in an fp32 model
(TOLERANCE_FP32), and in a bf16 model rounds fp8's fp32 scales to bf16 first (TOLERANCE_FP8).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from windlass.core.scheme import Scheme, scheme

torch = pytest.importorskip("torch")
if not all(map(find_spec, ("transformers", "compressed_tensors", "accelerate"))):  # imported when they are used: it takes long
    pytest.skip("no transformers, compressed_tensors and accelerate", allow_module_level=True)
save_file = pytest.importorskip("safetensors.torch").save_file

from windlass.tasks.convert.convert import ConvertSettings, convert  # noqa: E402 - it imports torch

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.filterwarnings("ignore"),  # theirs; ours have their own tests
]

TOLERANCE_FP32 = 2e-3
TOLERANCE_FP8 = 3e-2

# Layer 0 is dense with rows of 160, which take groups of 32; experts have rows of 128.
COMMON = {
    "vocab_size": 101, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_hidden_layers": 2, "intermediate_size": 160, "max_position_embeddings": 128,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "qwen3_moe": {
        **COMMON, "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "mlp_only_layers": [0],
    },
    "glm4_moe": {
        **COMMON, "moe_intermediate_size": 128, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "attention_bias": True, "use_qk_norm": True,
    },
}  # fmt: skip
PLAIN_ONLY: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 101, "n_embd": 128, "n_head": 4, "n_layer": 2, "n_positions": 128}
}
TOKENS = 24


def saved(folder: Path, family: str, **changes: Any) -> Path:
    """As transformers saves it; every weight random, biases and norms too."""
    import transformers

    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[family](**{**(CONFIGS | PLAIN_ONLY)[family], **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, value in model.state_dict().items():
        value.normal_(1.0 if "norm" in name else 0.0, 0.05)
    model.save_pretrained(folder)
    return folder


def unpacked(converted: Any, folder: Path) -> Path:
    """The same model without a scheme: weights as we unpack them, in fp32."""
    stems = ("_packed", "_scale", "_shape", "_zero_point")
    names = {next((name.removesuffix(stem) for stem in stems if name.endswith(stem)), name) for name in converted.tensors}
    folder.mkdir()
    save_file(
        {name: converted.matrix(name)[0].float() for name in names}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    config = {key: value for key, value in converted.config.items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@cache
def logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    """Read by transformers once: no folder is changed after that."""
    import transformers

    model, loading = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(loading.values()), loading
    with torch.no_grad():
        return model(torch.arange(1, TOKENS + 1).view(1, -1)).logits.float()


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def convert_and_compare(tiny: Any, source: Path, folder: Path, how: Scheme, dtype: torch.dtype, **settings: Any) -> float:
    out = folder / f"{source.name}-converted"
    if not out.exists():
        convert(source, out, ConvertSettings(scheme=how, jobs=1, **settings))
        unpacked(tiny.read(out), folder / "reference")
    return difference(logits(out, dtype), logits(folder / "reference", dtype))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family as its config is, made once."""
    return cache(lambda family: saved(tmp_path_factory.mktemp("sources") / family, family))


@pytest.mark.parametrize("quant", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_equal_those_of_our_own_unpacked_weights(
    family: str, quant: str, tiny: Any, sources: Callable[[str], Path], tmp_path: Path
) -> None:
    source = sources(family)
    how = scheme(quant, 128)
    in_fp32 = convert_and_compare(tiny, source, tmp_path, how, torch.float32)
    in_bf16 = convert_and_compare(tiny, source, tmp_path, how, torch.bfloat16)
    assert in_fp32 <= (0.0 if family == "llama" or quant == "fp8" else TOLERANCE_FP32)
    assert in_bf16 <= (TOLERANCE_FP8 if quant == "fp8" else 0.0)
    lost = difference(logits(tmp_path / "reference", torch.float32), logits(source, torch.float32))
    assert lost > 1e-3, "something was packed"


def test_a_row_that_the_group_does_not_divide_is_a_config_group_of_its_own(tiny: Any, tmp_path: Path) -> None:
    source = saved(tmp_path / "glm4_moe", "glm4_moe")
    assert convert_and_compare(tiny, source, tmp_path, scheme("int4", 128), torch.bfloat16) == 0.0
    converted = tiny.read(tmp_path / "glm4_moe-converted")
    assert converted.group("model.layers.0.mlp.down_proj") == 32
    assert converted.group("model.layers.0.mlp.up_proj") == converted.group("model.layers.1.mlp.experts.0.down_proj") == 128
    assert converted.ignored("model.layers.1.mlp.gate") and converted.ignored("lm_head")


def test_experts_with_two_groups(tiny: Any, tmp_path: Path) -> None:
    """transformers knows one scheme for all experts, and goes by the shape of their scales."""
    source = saved(tmp_path / "qwen3_moe", "qwen3_moe", moe_intermediate_size=96)
    assert convert_and_compare(tiny, source, tmp_path, scheme("int4", 128), torch.bfloat16) == 0.0
    converted = tiny.read(tmp_path / "qwen3_moe-converted")
    assert converted.group("model.layers.1.mlp.experts.0.down_proj") == 32
    assert converted.group("model.layers.1.mlp.experts.0.up_proj") == 128


def test_tied_head(tiny: Any, tmp_path: Path) -> None:
    """It has no weights of its own; readers would look for its codes unless told not to."""
    source = saved(tmp_path / "llama", "llama", tie_word_embeddings=True)
    assert convert_and_compare(tiny, source, tmp_path, scheme("int4", 128), torch.bfloat16) == 0.0
    converted = tiny.read(tmp_path / "llama-converted")
    assert "lm_head.weight" not in converted.tensors and converted.ignored("lm_head")


def test_tied_head_that_is_stored_as_well(tiny: Any, tmp_path: Path) -> None:
    """Not packed even when asked for: transformers ties it to the embedding again."""
    config = tiny.config("llama-tied")
    made = tiny.rules(config)
    tensors = tiny.stored(made, tiny.values(made))
    copy = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    source = tiny.write(tmp_path / "llama", config, {**tensors, **copy})
    how = msgspec.structs.replace(scheme("int4", 32), quantize_head=True)
    assert convert_and_compare(tiny, source, tmp_path, how, torch.bfloat16) == 0.0


def test_kept_layers_and_a_packed_head(tiny: Any, tmp_path: Path) -> None:
    source = saved(tmp_path / "glm4_moe", "glm4_moe")
    how = msgspec.structs.replace(scheme("int4", 128), quantize_head=True)
    keep = ("layers.0.self_attn", "shared_experts", "v_proj")
    assert convert_and_compare(tiny, source, tmp_path, how, torch.bfloat16, keep=keep) == 0.0
    assert "lm_head.weight_packed" in tiny.read(tmp_path / "glm4_moe-converted").tensors


def test_zero_points(tiny: Any, tmp_path: Path) -> None:
    source = saved(tmp_path / "llama", "llama")
    assert convert_and_compare(tiny, source, tmp_path, scheme("int4", 32, zero_points=True), torch.bfloat16) == 0.0


def test_experts_with_zero_points_are_ours_alone(tmp_path: Path) -> None:
    """transformers has no place for an expert's zero points, and vLLM refuses them; the report says so."""
    source = saved(tmp_path / "qwen3_moe", "qwen3_moe")
    report = convert(source, tmp_path / "out", ConvertSettings(scheme=scheme("int4", 32, zero_points=True), jobs=1, verify=True))
    assert any("zero points" in note for note in report.notes)
    with pytest.raises(RuntimeError):
        logits(tmp_path / "out", torch.bfloat16)


@pytest.mark.parametrize("family", ["glm4_moe", "gpt2"])
def test_bf16_output_is_a_plain_model(family: str, tmp_path: Path) -> None:
    """Matrices that a family stores [in, out] too."""
    source = saved(tmp_path / family, family)
    convert(source, tmp_path / "out", ConvertSettings(scheme=scheme("bf16"), jobs=1))
    assert torch.equal(logits(tmp_path / "out", torch.bfloat16), logits(source, torch.bfloat16))

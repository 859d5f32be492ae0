"""Files of every format are described as what they are, without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from windlass.core.scheme import Keep, scheme
from windlass.model.formats.gguf.writer import GgufOutput, header_bytes
from windlass.open import resolve, stored

pytestmark = pytest.mark.pure

HIDDEN, LAYERS = 64, 2


def gguf_file(path: Path, kind: str = "Q4_K", **more: Any) -> Path:
    """A header without weights."""
    keys = {
        "block_count": LAYERS, "context_length": 512, "embedding_length": HIDDEN, "feed_forward_length": 256,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    metadata = {"general.architecture": "llama", **{f"llama.{key}": value for key, value in keys.items()}, **more}
    tensors = [
        GgufOutput(name="token_embd.weight", shape=(256, HIDDEN), type="F32"),
        GgufOutput(name="output_norm.weight", shape=(HIDDEN,), type="F32"),
    ]
    for layer in range(LAYERS):
        tensors += [
            GgufOutput(name=f"blk.{layer}.{name}.weight", shape=shape, type=kind if shape[-1] == 256 else "F32")
            for name, shape in (
                ("attn_norm", (HIDDEN,)), ("ffn_norm", (HIDDEN,)), ("attn_q", (64, HIDDEN)), ("attn_k", (32, HIDDEN)),
                ("attn_v", (32, HIDDEN)), ("attn_output", (HIDDEN, 64)), ("ffn_gate", (256, HIDDEN)), ("ffn_up", (256, HIDDEN)),
                ("ffn_down", (HIDDEN, 256)),
            )
        ]  # fmt: skip
    header = header_bytes(metadata, tensors)
    path.write_bytes(header + b"\0" * sum(-(-tensor.num_bytes // 32) * 32 for tensor in tensors))
    return path


def test_a_gguf_file_is_described(tmp_path: Path) -> None:
    found = resolve.describe_path(gguf_file(tmp_path / "small.gguf"))
    assert found.spec.name == "small" and found.spec.num_layers == LAYERS and found.spec.tied_head
    assert found.files is not None and found.files.format == "gguf" and not found.files.only_on_cpus
    assert found.files.num_bytes == (tmp_path / "small.gguf").stat().st_size
    assert resolve.model_config(str(tmp_path / "small.gguf"))[0]["hidden_size"] == HIDDEN
    assert resolve.describe_path(tmp_path).spec == found.spec or resolve.describe_path(tmp_path).spec.num_layers == LAYERS


def test_the_digest_knows_the_header(tmp_path: Path) -> None:
    one = resolve.describe_path(gguf_file(tmp_path / "a.gguf", "Q4_K")).digest
    (tmp_path / "other").mkdir()
    assert resolve.describe_path(gguf_file(tmp_path / "other" / "a.gguf", "Q6_K")).digest != one


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("Q4_0", scheme("int4", 32)),
        ("Q4_1", scheme("int4", 32, zero_points=True)),
        ("Q4_K", scheme("int4", 32, zero_points=True)),
        ("Q8_0", scheme("int8", 32)),
        ("F32", scheme("fp32")),
        ("Q6_K", None),
        ("F16", None),
    ],
)
def test_how_blocks_are_held(kind: str, expected: Any) -> None:
    assert stored.ggml_scheme(kind) == expected


def _tensor(kind: str, rows: int, inputs: int = 256) -> Any:
    return SimpleNamespace(name="blk.0.ffn_up.weight", type=SimpleNamespace(name=kind), shape=(rows, inputs), num_rows=rows)


@pytest.mark.parametrize(
    ("rows", "bits"),
    [
        ({"Q4_K": 10}, 4.625),
        ({"Q4_K": 90, "Q6_K": 10}, 0.9 * 4.625 + 0.1 * 6.5625),
        ({"Q4_K": 80, "Q8_0": 10, "F32": 10}, 0.8 * 4.625 + 0.85 + 3.2),
        ({"IQ2_XXS": 10}, 2.0625),
        ({"Q8_0": 10}, 8.5),
        ({"Q4_0": 90, "Q8_0": 10}, 0.9 * 4.5 + 0.85),
        ({"Q4_1": 10}, 5.0),
    ],
)
def test_files_of_blocks_have_the_bits_that_they_have(rows: dict[str, int], bits: float) -> None:
    """The mean over all matrices, as they are held: Q4_K has its twelve bytes of scales as sixteen."""
    found = stored._file_scheme(next(iter(rows)), [_tensor(kind, count) for kind, count in rows.items()])
    assert found is not None and found.name == next(iter(rows)).lower()
    assert found.bits + 8 * found.scale_bytes / (found.group or 1) == pytest.approx(bits, abs=0.02)


def test_rows_that_are_no_whole_blocks_have_the_same_bits() -> None:
    """576 is no multiple of 256: its scales would be counted for every 64."""
    found = stored._file_scheme("Q8_0", [_tensor("Q8_0", 90, 576), _tensor("Q5_0", 10, 1536)])
    assert found is not None and found.group == 64
    wanted = (90 * 576 * 8.5 + 10 * 1536 * 5.5) / (90 * 576 + 10 * 1536)
    assert found.bits_per_weight == pytest.approx(wanted, abs=0.07)
    assert found.stored(Keep.QUANTIZE, 576).matrix_bytes(90, 576) * 8 / (90 * 576) == found.bits_per_weight


def packed(symmetric: bool) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": symmetric}
    return {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}}


def test_how_directories_are_held() -> None:
    assert stored.config_scheme(packed(True)) == scheme("int4", 32)
    assert stored.config_scheme(packed(False)) == scheme("int4", 32, zero_points=True)
    assert stored.config_scheme({}) is None
    assert stored.config_scheme({"quantization_config": {"quant_method": "awq"}}) == scheme("int4", 128, zero_points=True)
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True}
    assert stored.config_scheme({"quantization_config": gptq}) == scheme("int4", 64)
    assert stored.config_scheme({"quantization_config": {"quant_method": "bitsandbytes"}}) is None


def test_files_are_planned_as_they_are_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    from windlass.cli import execute

    file = str(gguf_file(tmp_path / "small.gguf", "Q4_0", **{"llama.feed_forward_length": 256}))
    for hardware, expected in (("cpu:8,ram=16GB", "fp32"), ("1xRTX-4090", "fp32")):  # most of the small file's matrices are F32
        assert execute(["plan", file, "--on", hardware, "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["scheme"]["name"] == expected
        assert any(reason["why"] == "as the files are stored" for reason in plan["reasons"])
    assert execute(["models", "show", file]) == 0
    assert "gguf" in capsys.readouterr().out


def test_describing_needs_no_torch(tmp_path: Path) -> None:
    file = gguf_file(tmp_path / "small.gguf")
    code = "import sys; from pathlib import Path; from windlass.open.resolve import describe_path; "
    code += f"describe_path(Path({str(file)!r})); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "False"

"""`windlass convert` as a user gives it: reports, several sources, Distributed Llama's files and back, and words it does not take."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from windlass.cli import execute as run
from windlass.open.generation import DEFAULTS, default_sampling

pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file

pytestmark = pytest.mark.cpu

FEW = ["--jobs", "1"]


@pytest.fixture
def source(tiny: Any, tmp_path: Path) -> Path:
    folder = tiny.make(tmp_path / "tiny-model", "llama", intermediate_size=96)
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    return folder


def printed_line(capsys: pytest.CaptureFixture[str]) -> str:
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and printed.err.startswith("windlass: "), printed
    return printed.err


def test_report_for_a_person(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(["convert", str(source), str(out), *FEW]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    for words in (
        "tiny-model (llama)",
        "int4, groups of 128",
        "times smaller",
        "relative RMS",
        "GB/s",
        "peak memory",
        "--calibrate self loses less",
    ):
        assert words in printed.out, words
    assert "smaller groups: re:^model" in printed.out and "groups of 32" in printed.out
    text = (out / "windlass-report.md").read_text()
    assert "## Largest errors" in text and "## Not quantized" in text and "model.safetensors" in text


def test_report_for_a_machine(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(["convert", str(source), str(out), "--quant", "int8", "--group", "64", "--json", *FEW]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert printed.err == ""
    assert report == json.loads((out / "windlass-report.json").read_text())
    assert (report["model"], report["family"], report["scheme"], report["group"]) == ("tiny-model", "llama", "int8", 64)
    assert {one["file"]: one["sha256"] for one in report["files"]} == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in out.glob("*.safetensors")
    }
    assert report["source_bytes"] == sum(file.stat().st_size for file in source.glob("*.safetensors"))
    assert 0 < report["relative_rms"] < 0.02 and report["peak_memory_bytes"] > 0 and report["seconds"] > 0
    errors = [one["relative_rms"] for one in report["tensors"]]
    assert errors == sorted(errors, reverse=True) and len(errors) == 14


def test_companions_come_along_and_code_does_not(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(["convert", str(source), str(out), "--json", *FEW]) == 0
    names = {file.name for file in out.iterdir()}
    assert names == {
        "config.json", "generation_config.json", "chat_template.jinja", "model.safetensors", "windlass-report.json", "windlass-report.md",
    }  # fmt: skip


def test_verify(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", str(source), str(tmp_path / "out"), "--asymmetric", "--group", "32", "--verify", *FEW]) == 0
    assert "tensors read back and compared with the source" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["codes", "kept"])
def test_verify_notices_what_was_written_wrongly(
    what: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that lies: one bit of a file is not what was written."""
    from windlass.tasks.convert import convert as module

    out = tmp_path / "out"
    whole = module._verified

    def flip(report: Any, job: Any) -> Any:
        file = out / "model.safetensors"
        content = bytearray(file.read_bytes())
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        name = "model.layers.1.mlp.up_proj.weight_packed" if what == "codes" else "model.norm.weight"
        content[8 + length + header[name]["data_offsets"][0] + 3] ^= 0x80
        file.write_bytes(content)
        return whole(report, job)

    monkeypatch.setattr(module, "_verified", flip)
    assert run(["convert", str(source), str(out), "--verify", *FEW]) == 2
    assert ("up_proj" if what == "codes" else "model.norm.weight") in printed_line(capsys)
    assert not (out / "config.json").exists()


def test_several_sources(source: Path, tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = tiny.make(tmp_path / "second.model", "glm4_moe")
    assert run(["convert", str(source), str(second), "--out-dir", str(tmp_path / "all"), "--quant", "fp8", "--json", *FEW]) == 0
    reports = json.loads(capsys.readouterr().out)
    assert [report["model"] for report in reports] == ["tiny-model", "second.model"]
    for name in ("tiny-model-fp8", "second.model-fp8"):
        assert (tmp_path / "all" / name / "config.json").exists()


def test_resumed_with_the_same_words(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from windlass.tasks.convert import convert as module

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    words = ["convert", str(source), str(tmp_path / "out"), "--json", *FEW]
    with monkeypatch.context() as patch:
        patch.setattr(module, "_finish", stop)
        assert run(words) == 130
    assert run(words) == 0


# --- Distributed Llama -----------------------------------------------------------------------------------------------


DLLAMA = {"attention_bias": False, "mlp_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "glm4_moe"])
def test_to_distributed_llama_and_back(name: str, tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In f32 nothing is lost: what comes back is what was there."""
    changes: dict[str, Any] = (
        DLLAMA if name == "llama" else {"mlp_only_layers": [], "decoder_sparse_step": 1} if name == "qwen3_moe" else {}
    )
    source = tiny.make(tmp_path / "in", name, **changes)
    file = tmp_path / "model.m"
    assert run(["convert", str(source), str(file), "--to", "dllama", "--quant", "fp32", *FEW]) == 0
    told = capsys.readouterr().out
    assert "model.m" in told
    assert ("Distributed Llama" in told) == (name == "glm4_moe"), "it says where only Windlass reads the file"
    assert run(["convert", str(file), str(tmp_path / "back"), "--quant", "bf16", *FEW]) == 0
    back = load_file(tmp_path / "back" / "model.safetensors")
    tensors: dict[str, Any] = {}
    for part in source.glob("*.safetensors"):
        tensors |= load_file(part)
    assert back.keys() == tensors.keys()
    for key, value in tensors.items():
        assert back[key].equal(value), key


@pytest.mark.parametrize(("quant", "blocks"), [("int4", "q40"), ("int8", "q80")])
def test_blocks_are_carried_back(quant: str, blocks: str, tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rounded once on the way there, not again on the way back."""
    source = tiny.make(tmp_path / "in", "llama", **DLLAMA)
    assert run(["convert", str(source), str(tmp_path), "--to", "dllama", "--quant", quant, *FEW]) == 0
    file = tmp_path / f"dllama_model_in_{blocks}.m"
    capsys.readouterr()
    out = tmp_path / "back"
    assert (
        run(["convert", str(file), str(out), "--quant", quant, "--group", "32", "--quantize-head", "--verify", "--json", *FEW])
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert report["relative_rms"] == 0.0
    assert any("copied, not quantized again" in note for note in report["notes"])


@pytest.mark.parametrize("value", [0x7C00, 0x7E00])
def test_blocks_with_a_scale_that_is_no_number(value: int, tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny.make(tmp_path / "in", "llama", **DLLAMA)
    file = tmp_path / "model.m"
    assert run(["convert", str(source), str(file), "--to", "dllama", *FEW]) == 0
    capsys.readouterr()
    content = bytearray(file.read_bytes())
    head = 101 * 128 // 32 * 18  # the last tensor, in blocks of 18 bytes
    block = len(content) - head - 3 * 128 * 4 - 18  # before it three norms in fp32, and before them the last layer's up_proj
    content[block : block + 2] = struct.pack("<H", value)
    file.write_bytes(content)
    assert run(["convert", str(file), str(tmp_path / "back"), "--group", "32", *FEW]) == 2
    assert "NaN" in printed_line(capsys)
    assert not (tmp_path / "back" / "config.json").exists()


def test_tokenizer_goes_along_to_distributed_llama(tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    source = tiny.make(tmp_path / "in", "llama", **DLLAMA)
    vocabulary = {chr(97 + index): index for index in range(26)}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [])).save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text('{"bos_token": "a", "eos_token": "b"}')
    (source / "generation_config.json").write_text('{"do_sample": false}')
    code = run(["convert", str(source), str(tmp_path), "--to", "dllama", *FEW])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert default_sampling(tmp_path / "dllama_model_in_q40.m")["temperature"] == 0.0, "sampling as the original says"
    assert default_sampling(tmp_path / "dllama_model_other_q40.m") == DEFAULTS
    assert (tmp_path / "dllama_tokenizer_in_q40.t").exists() and ".t" in printed.out


# --- words it does not take --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["{source}"], "--out-dir"),
        (["{source}", "a", "b"], "--out-dir"),
        ([], "SOURCE"),
        (["{source}", "{out}", "--quant", "int3"], "--quant"),
        (["{source}", "{out}", "--quant", "fp32"], "--quant"),
        (["{source}", "{out}", "--quant", "mxfp4"], "--quant"),
        (["{source}", "{out}", "--group", "48"], "group size 48"),
        (["{source}", "{out}", "--group", "many"], "--group"),
        (["{source}", "{out}", "--to", "onnx"], "--to"),
        (["{source}", "{out}", "--to", "gguf", "--quant", "Q3_K"], "--quant"),
        (["{source}", "{out}", "--to", "gguf", "--calibrate", "self"], "--calibrate"),
        (["{source}", "{out}", "--mtp", "maybe"], "--mtp"),
        (["{source}", "{out}", "--jobs", "-1"], "--jobs"),
        (["{source}", "{out}", "--max-memory", "lots"], "lots"),
        (["{source}", "{out}", "--stream", "--verify"], "--stream"),
        (["{source}", "{out}", "--stream"], "is local; leave it out"),
        (["{source}", "{out}", "--to", "dllama", "--quant", "fp8"], "fp8"),
        (["{source}", "{out}", "--to", "dllama", "--verify"], "--verify"),
        (["{source}", "{out}.gguf", "--keep", "lm_head"], "--keep is not supported with --to gguf"),
        (["{source}", "{out}.gguf", "--group", "32"], "--group is not supported with --to gguf"),
        (["{source}", "{out}", "--to", "dllama", "--asymmetric"], "--asymmetric is not supported with --to dllama"),
        (["{source}", "{out}.gguf", "--jobs", "-1"], "--jobs must be 0"),
        (["{source}/config.json", "{out}"], "neither"),
        (["no-such-model", "{out}"], "unknown model"),
        (["./no/such/place", "{out}"], "no/such/place"),
        (["~nobody-of-that-name/model", "{out}"], "nobody-of-that-name"),
        (["x" * 300, "{out}"], "xxx"),
        (["{source}", "{out}", "--frobnicate"], "--frobnicate"),
    ],
)
def test_words_it_does_not_take(
    words: list[str], expected: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(["convert", *(word.format(source=source, out=out) for word in words)]) == 2
    assert expected in printed_line(capsys)
    assert not (out / "config.json").exists()


def test_two_sources_that_would_share_an_output(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Known before the first is converted."""
    shutil.copytree(source, tmp_path / "elsewhere" / source.name)
    words = [str(source), str(tmp_path / "elsewhere" / source.name), "--out-dir", str(tmp_path / "all")]
    assert run(["convert", *words]) == 2
    assert "tiny-model-int4" in printed_line(capsys)
    assert not (tmp_path / "all").exists()


# --- a real one ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("quant", "most"), [("int8", 0.008), ("int4", 0.09)])
def test_smollm2(quant: str, most: float, smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "smollm2"
    assert run(["convert", str(smollm2), str(out), "--quant", quant, "--group", "32", "--verify", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["family"] == "llama" and 0 < report["relative_rms"] < most
    assert any("compared with the source" in note for note in report["notes"])
    config = json.loads((out / "config.json").read_text())
    assert (config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]) == (576, 9, 3)
    assert config["tie_word_embeddings"] and "lm_head" in config["quantization_config"]["ignore"]
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("A windlass lifts heavy weights.").ids) == "A windlass lifts heavy weights."
    assert "chat_template" in json.loads((out / "tokenizer_config.json").read_text()) or (out / "chat_template.jinja").exists()

"""Damaged, contradictory and hostile sources, and outputs that cannot be written: one clear line each, and nothing that looks finished."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from windlass.cli import execute as run
from windlass.core.scheme import scheme
from windlass.errors import BadCheckpoint, BadInput, DoesNotFit, Error

torch = pytest.importorskip("torch")
st = pytest.importorskip("safetensors.torch")

from windlass.tasks.convert.convert import ConvertSettings, convert  # noqa: E402 - it imports torch

pytestmark = pytest.mark.cpu

FIRST = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="session")
def models(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole checkpoints, to be copied and damaged."""
    folder = tmp_path_factory.mktemp("whole")
    for name in ("llama", "glm4_moe", "gpt_oss", "gpt2"):
        tiny.make(folder / name, name)
    return folder


@pytest.fixture
def source(models: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(models / "llama", tmp_path / "llama"))


def settings(quant: str = "int4", **changes: Any) -> ConvertSettings:
    return ConvertSettings(scheme=scheme(quant, 32), jobs=1, **changes)


def refused(
    source: Path, capsys: pytest.CaptureFixture[str], *words: str, kind: type[Error] = BadInput, quant: str = "int4"
) -> None:
    """By the function and by the command: one line that has these words, and no config in the output."""
    out = source.parent / "out"
    with pytest.raises(kind) as caught:
        convert(source, out, settings(quant))
    assert not (out / "config.json").exists()
    assert not list(out.glob("*.safetensors")) if out.exists() else True
    code = run(["convert", str(source), str(source.parent / "again"), "--quant", quant, "--group", "32", "--jobs", "1"])
    printed = capsys.readouterr()
    assert code == caught.value.exit_code in (2, 3)
    assert printed.out == "" and printed.err.startswith("windlass: ") and printed.err.count("\n") == 1, printed.err
    assert "Traceback" not in printed.err
    for word in words:
        assert word in str(caught.value) and word in printed.err, (word, printed.err)


def change(source: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Rewrites the tensors, the index in step."""
    tensors: dict[str, Any] = {}
    for file in source.glob("*.safetensors"):
        tensors |= st.load_file(file)
        file.unlink()
    edit(tensors)
    (source / INDEX).unlink()
    st.save_file({name: value.contiguous() for name, value in tensors.items()}, source / "model.safetensors")


def edit_index(source: Path, edit: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((source / INDEX).read_text())
    edit(index["weight_map"])
    (source / INDEX).write_text(json.dumps(index))


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_header(file: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 3, 8, 40, 500, -1, -5000])
def test_truncated_file(size: int, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = (source / FIRST).read_bytes()
    (source / FIRST).write_bytes(content[:size])
    refused(source, capsys, FIRST, "byte", kind=BadCheckpoint)


@pytest.mark.parametrize("length", [2**63, 2**40, 10**8 + 1, 5])
def test_header_that_claims_another_length(length: int, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = (source / FIRST).read_bytes()
    (source / FIRST).write_bytes(struct.pack("<Q", length) + content[8:])
    refused(source, capsys, FIRST, kind=BadCheckpoint)


@pytest.mark.parametrize("shape", [[2**31, 2**31], [10**6, 128], [1, 1]])
def test_tensor_that_claims_more_than_the_file_holds(shape: list[int], source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, data = header_of(source / FIRST)
    name = next(name for name in header if name.endswith("proj.weight"))
    start = header[name]["data_offsets"][0]
    header[name].update(shape=shape, data_offsets=[start, start + shape[0] * shape[1] * 2])
    write_header(source / FIRST, header, data)
    refused(source, capsys, FIRST, "tensor", kind=BadCheckpoint)


def test_random_bytes_in_the_header(models: Path, tmp_path: Path) -> None:
    """Whatever a flipped byte does, it is an error of ours or harms nothing."""
    import random

    chance = random.Random(0)
    whole = (models / "llama" / FIRST).read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    for trial in range(40):
        source = Path(shutil.copytree(models / "llama", tmp_path / f"in{trial}"))
        content = bytearray(whole)
        for _ in range(chance.choice((1, 1, 4))):
            content[chance.randrange(8 + length)] = chance.randrange(256)
        (source / FIRST).write_bytes(content)
        out = tmp_path / f"out{trial}"
        try:
            convert(source, out, settings())
        except Error:
            assert not (out / "config.json").exists()


@pytest.mark.parametrize("target", ["elsewhere.safetensors", "/etc/hostname", "nowhere"])
def test_link_out_of_the_directory(target: str, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = source.parent / "elsewhere.safetensors"
    shutil.move(source / FIRST, elsewhere)
    (source / FIRST).symlink_to(elsewhere if target.startswith("elsewhere") else target)
    refused(source, capsys, FIRST, "link", kind=BadCheckpoint)


def test_companion_that_links_out_of_the_directory(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tokenizer.json that is a link to somebody's keys must not be copied into a folder that is then published."""
    secret = source.parent / "secret"
    secret.write_text("{}")
    (source / "tokenizer.json").symlink_to(secret)
    refused(source, capsys, "tokenizer.json", "link", kind=BadCheckpoint)


def test_link_within_the_directory(source: Path) -> None:
    (source / "blobs").mkdir()
    shutil.move(source / FIRST, source / "blobs" / "1234")
    (source / FIRST).symlink_to("blobs/1234")
    (source / "real.txt").write_text("{}")
    (source / "tokenizer_config.json").symlink_to("real.txt")
    convert(source, source.parent / "out", settings(verify=True))
    assert (source.parent / "out" / "tokenizer_config.json").read_text() == "{}"


def test_index_that_leads_out_of_the_directory(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(source / FIRST, source.parent / FIRST)
    edit_index(source, lambda index: index.update({name: f"../{FIRST}" for name, file in index.items() if file == FIRST}))
    refused(source, capsys, f"../{FIRST}", kind=BadCheckpoint)


def test_pickle_that_runs_code(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pickle

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(source.parent / "ran"),)

    for file in source.glob("*model*"):
        file.unlink()
    torch.save({"model.norm.weight": Evil()}, source / "pytorch_model.bin", pickle_module=pickle)
    refused(source, capsys, "pytorch_model.bin", kind=BadCheckpoint)
    assert not (source.parent / "ran").exists()


# --- config, index and tensors that contradict each other -----------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_size": 256}, "shape"),
        ({"intermediate_size": 160}, "mlp"),
        ({"num_key_value_heads": 4}, "k_proj"),
        ({"vocab_size": 102}, "embed_tokens"),
        ({"num_hidden_layers": 3}, "model.layers.2."),
        ({"num_hidden_layers": 1}, "model.layers.1."),
        ({"attention_bias": False, "mlp_bias": False}, "bias"),
        ({"model_type": "frobnicator"}, "model_type"),
        ({"model_type": "gpt2"}, "config.json"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ],
)
def test_config_that_does_not_belong(
    changes: dict[str, Any], word: str, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **changes}))
    refused(source, capsys, word)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model_type": 7}', "null", "\udcff"])
def test_config_that_is_none(text: str, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (source / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    refused(source, capsys, "config.json")


def test_no_config(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (source / "config.json").unlink()
    refused(source, capsys, "config.json")


def test_empty_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    refused(tmp_path / "empty", capsys, "no weights")


def test_tensor_in_two_files(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    st.save_file({Q_PROJ: torch.zeros(128, 128)}, source / "model-00003-of-00002.safetensors")
    refused(source, capsys, Q_PROJ, kind=BadCheckpoint)


def test_tensor_twice_in_a_header(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, data = header_of(source / FIRST)
    name = next(name for name in header if name.endswith("proj.weight"))
    text = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"
    (source / FIRST).write_bytes(struct.pack("<Q", len(text)) + text.encode() + data)
    refused(source, capsys, name, "twice", kind=BadCheckpoint)


def test_two_layouts_at_once(models: Path, tmp_path: Path, tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Experts one by one and stacked: which of them counts is not known."""
    source = Path(shutil.copytree(models / "glm4_moe", tmp_path / "glm4_moe"))
    made = tiny.rules(tiny.config("glm4_moe"))
    stacked = tiny.stored(made, tiny.values(made), 9)
    change(source, lambda tensors: tensors.update(stacked))
    refused(source, capsys, "experts", kind=BadCheckpoint)


def test_index_without_an_entry_is_read_all_the_same(source: Path) -> None:
    """As GLM-4.6's was: the tensors lie in the files, and the files count."""
    edit_index(source, lambda index: index.pop(Q_PROJ))
    convert(source, source.parent / "out", settings(verify=True))


@pytest.mark.parametrize("file", ["model-00009-of-00009.safetensors", FIRST, "", "/etc/passwd"])
def test_index_entry_that_is_wrong(file: str, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_index(source, lambda index: index.update({"model.layers.9.mystery": file}))
    refused(source, capsys, kind=BadCheckpoint)


def test_index_that_names_the_other_file(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = json.loads((source / INDEX).read_text())["weight_map"]
    name = next(name for name, file in index.items() if file != FIRST)
    edit_index(source, lambda index: index.update({name: FIRST}))
    refused(source, capsys, name, kind=BadCheckpoint)


@pytest.mark.parametrize("name", [Q_PROJ, "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"])
def test_missing_tensor(name: str, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(source, lambda tensors: tensors.pop(name))
    refused(source, capsys, name, kind=BadCheckpoint)


def test_missing_expert(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = Path(shutil.copytree(models / "glm4_moe", tmp_path / "glm4_moe"))
    name = "model.layers.2.mlp.experts.4.down_proj.weight"
    change(source, lambda tensors: tensors.pop(name))
    refused(source, capsys, name, kind=BadCheckpoint)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.lora_A.weight", "adapter", "model.layers.2.mlp.up_proj.weight"]
)
def test_unknown_tensor(name: str, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be part of the mathematics."""
    change(source, lambda tensors: tensors.update({name: torch.zeros(8, 8)}))
    refused(source, capsys, name, kind=BadCheckpoint)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool, torch.float8_e5m2, torch.float8_e4m3fn, torch.complex64])
def test_weights_of_a_type_that_holds_no_weights(dtype: torch.dtype, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Codes without their scales are not weights."""
    change(source, lambda tensors: tensors.update({Q_PROJ: torch.zeros(128, 128).to(dtype)}))
    refused(source, capsys, Q_PROJ, kind=BadCheckpoint)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_kept_weights_of_a_type_that_holds_no_weights(name: str, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(source, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    refused(source, capsys, name, kind=BadCheckpoint)


def test_a_directory_that_was_converted_already_is_converted_from_its_numbers(models: Path, tmp_path: Path) -> None:
    """To more bits without a further loss: int8 of int4 numbers is within int8's error of them, and bf16 nearer still."""
    convert(models / "llama", tmp_path / "int4", settings())
    report = convert(tmp_path / "int4", tmp_path / "bf16", settings("bf16"))
    assert report.scheme == "bf16" and not report.tensors
    again = convert(tmp_path / "int4", tmp_path / "int8", settings("int8"))
    assert 0 < again.relative_rms < 0.01


# --- scales and blocks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "shape"),
    [
        ("_scale", (64, 1)),
        ("_scale", (200, 1)),
        ("_scale_inv", (0, 1)),
        ("_scale_inv", (1, 2)),
        ("_scale_inv", (2, 1)),
        ("_scale", (128, 2)),
    ],
)
def test_scales_of_another_shape(suffix: str, shape: tuple[int, ...], source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codes = torch.ones(128, 128).to(torch.float8_e4m3fn)
    change(source, lambda tensors: tensors.update({Q_PROJ: codes, f"{Q_PROJ}{suffix}": torch.ones(shape)}))
    refused(source, capsys, Q_PROJ, "shape", kind=BadCheckpoint)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers(value: float, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codes = torch.ones(128, 128).to(torch.float8_e4m3fn)
    scale = torch.ones(128, 1)
    scale[77] = value
    change(source, lambda tensors: tensors.update({Q_PROJ: codes, f"{Q_PROJ}_scale": scale}))
    refused(source, capsys, Q_PROJ, "NaN", kind=BadCheckpoint)


BLOCKS = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    "what", ["fewer experts", "fewer rows", "fewer blocks", "no scales", "fewer scales", "half a block", "floats"]
)
def test_mxfp4_blocks_of_another_shape(what: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def damage(tensors: dict[str, Any]) -> None:
        blocks, scales = f"{BLOCKS}_blocks", f"{BLOCKS}_scales"
        match what:
            case "fewer experts":
                tensors[blocks], tensors[scales] = tensors[blocks][:2], tensors[scales][:2]
            case "fewer rows":
                tensors[blocks], tensors[scales] = tensors[blocks][:, :64], tensors[scales][:, :64]
            case "fewer blocks":
                tensors[blocks], tensors[scales] = tensors[blocks][:, :, :2], tensors[scales][:, :, :2]
            case "no scales":
                del tensors[scales]
            case "fewer scales":
                tensors[scales] = tensors[scales][:, :, :1]
            case "half a block":
                tensors[blocks] = tensors[blocks][..., :8]
            case _:
                tensors[blocks] = tensors[blocks].float()

    source = Path(shutil.copytree(models / "gpt_oss", tmp_path / "gpt_oss"))
    change(source, damage)
    refused(source, capsys, BLOCKS, kind=BadCheckpoint)


# --- numbers that are none -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", ["int4", "int8", "fp8", "bf16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [Q_PROJ, "model.norm.weight", "lm_head.weight"])
def test_not_a_number(name: str, value: float, quant: str, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def damage(tensors: dict[str, Any]) -> None:
        tensors[name].view(-1)[97] = value

    change(source, damage)
    refused(source, capsys, name, "NaN", kind=BadCheckpoint, quant=quant)


def test_not_a_number_in_one_expert(tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stacked in the source; the message names the expert's own."""
    config = tiny.config("glm4_moe")
    made = tiny.rules(config)
    tensors = tiny.stored(made, tiny.values(made), 9)
    tensors["model.layers.1.mlp.experts.gate_up_proj"][3, 70, 5] = float("nan")
    refused(
        tiny.write(tmp_path / "in", config, tensors), capsys, "model.layers.1.mlp.experts.3.up_proj.weight", kind=BadCheckpoint
    )


@pytest.mark.parametrize(("dtype", "value"), [("float16", 70000.0), ("bfloat16", 3.4e38)])
def test_kept_weights_that_sixteen_bits_cannot_hold(
    dtype: str, value: float, tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Finite in the source's fp32, infinite in what would be written."""
    config = tiny.config("llama", torch_dtype=dtype)
    made = tiny.rules(config)
    tensors = tiny.stored(made, tiny.values(made, "float32"))
    tensors["model.norm.weight"][5] = value
    refused(tiny.write(tmp_path / "in", config, tensors), capsys, "model.norm.weight", kind=BadCheckpoint)


def test_repaired_source_after_a_failure(source: Path, models: Path) -> None:
    """The work that was done for a damaged source is not mixed with that of a repaired one."""
    out = source.parent / "out"

    def damage(tensors: dict[str, Any]) -> None:
        tensors[Q_PROJ][0, 0] = float("nan")

    change(source, damage)
    with pytest.raises(BadCheckpoint):
        convert(source, out, settings())
    shutil.rmtree(source)
    shutil.copytree(models / "llama", source)
    with pytest.raises(BadInput, match="a different source"):
        convert(source, out, settings())


# --- outputs ---------------------------------------------------------------------------------------------------------------


def test_output_that_holds_a_model(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = source.parent / "out"
    convert(source, out, settings())
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    assert run(["convert", str(source), str(out), "--quant", "int8"]) == 2
    printed = capsys.readouterr()
    assert "already holds a model" in printed.err and printed.err.count("\n") == 1
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert run(["convert", str(source), str(source)]) == 2, "nor is the source overwritten"


def test_unfinished_work_of_other_settings(
    source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from windlass.tasks.convert import convert as module

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    out = source.parent / "out"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "_finish", stop)
        convert(source, out, settings())
    assert not (out / "config.json").exists()
    for other in (settings("int8"), settings(keep=("q_proj",)), ConvertSettings(scheme=scheme("int4", 64), jobs=1)):
        with pytest.raises(BadInput, match="unfinished work"):
            convert(source, out, other)
    other_source = Path(shutil.copytree(source, source.parent / "other"))
    os.utime(other_source / FIRST)
    with pytest.raises(BadInput, match="a different source"):
        convert(other_source, out, settings())
    assert run(["convert", str(source), str(out), "--quant", "int8"]) == 2
    printed = capsys.readouterr()
    assert "delete" in printed.err and printed.err.count("\n") == 1
    convert(source, out, settings(verify=True))
    assert (out / "config.json").exists() and not [file for file in out.iterdir() if file.name.startswith(".")]


@pytest.mark.parametrize("place", ["a file", "under a file", "too long", "proc"])
def test_output_that_cannot_be_made(place: str, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (source.parent / "file").write_text("")
    out = {
        "a file": source.parent / "file",
        "under a file": source.parent / "file" / "out",
        "too long": source.parent / ("x" * 300),
        "proc": Path("/proc/out"),
    }[place]
    assert run(["convert", str(source), str(out)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and "Traceback" not in printed.err


def test_disk_that_is_too_small(source: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Known before a byte is written."""
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6 - 1000, 1000))
    refused(source, capsys, "not enough disk", kind=DoesNotFit)
    assert list((source.parent / "out").iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A megabyte that really ends."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("mounting a small disk takes root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_disk_that_fills_up(
    small_disk: Path, tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else took the room after it was asked for; with room again, the work is finished."""
    from windlass.tasks.convert import convert as module

    source = tiny.make(tmp_path / "in", "llama", vocab_size=4000)
    out = small_disk / "out"
    command = ["convert", str(source), str(out), "--group", "32", "--jobs", "1"]
    assert run(command) == 3
    assert not out.exists() or not (out / "config.json").exists()
    assert "not enough disk" in capsys.readouterr().err
    monkeypatch.setattr(module, "require_free", lambda *_: None)
    assert run(command) == 3
    printed = capsys.readouterr()
    assert "disk full" in printed.err and printed.err.count("\n") == 1
    assert not (out / "config.json").exists() and not list(out.glob("*.safetensors"))
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    assert run([*command, "--verify"]) == 0

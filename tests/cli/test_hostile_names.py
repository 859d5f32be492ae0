"""Names in strangers' files reach the terminal as plain text: in errors, in tables, in what other processes say."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from windlass.cli import execute
from windlass.cli.console import console
from windlass.foreign import MAX_MESSAGE
from windlass.model.bundled.models import find_bundled
from windlass.model.formats.gguf.writer import GgufOutput, header_bytes

pytestmark = pytest.mark.pure

EVIL = "\x1b]0;title\x07\x1b[31m\u202eabc\u2066\x9b2J\r\x08[/nothing]"
LONG = EVIL + "x" * 5_000
KEYS = {
    "block_count": 1, "context_length": 512, "embedding_length": 64, "feed_forward_length": 256,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip


def gguf(folder: Path, name: str = "model", architecture: str = "llama", tensors: tuple[str, ...] = (), **more: Any) -> Path:
    metadata = {"general.architecture": architecture, **{f"{architecture}.{key}": value for key, value in KEYS.items()}, **more}
    head = header_bytes(
        metadata, [GgufOutput(name=tensor, shape=(64,), type="F32") for tensor in ("token_embd.weight", *tensors)]
    )
    path = folder / f"{name}.gguf"
    path.write_bytes(head + bytes(256 * (1 + len(tensors))))
    return path


def config(folder: Path, **values: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def damaged(folder: Path) -> Path:
    """The length of its first key's value is nonsense."""
    path = folder / "damaged.gguf"
    key = LONG.encode()
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + struct.pack("<Q", len(key)) + key + struct.pack("<I", 99))
    return path


def safetensors(folder: Path) -> Path:
    model = find_bundled("tiny-glm")
    assert model is not None
    config(folder, **json.loads((model / "config.json").read_text()))
    header = json.dumps({LONG: {"dtype": EVIL, "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    return folder


FILES = {
    "architecture": lambda folder: gguf(folder, architecture=EVIL),
    "long architecture": lambda folder: gguf(folder, architecture=LONG),
    "tensor": lambda folder: gguf(folder, tensors=(EVIL,)),
    "metadata": lambda folder: gguf(folder, **{"general.name": LONG, "llama.rope.scaling.type": EVIL, EVIL: EVIL}),
    "file": lambda folder: gguf(folder, name="a\x1b[31m\u202eb[link=x]"),
    "damaged": damaged,
    "family": lambda folder: config(folder / "model", model_type=LONG, architectures=[EVIL]),
    "folder": lambda folder: config(folder / "a\x1b[31m\u202eb[link=x]", model_type="llama", hidden_size=EVIL),
    "value": lambda folder: config(folder / "model", model_type="llama", hidden_size=LONG),
    "safetensors": safetensors,
}  # fmt: skip


COMMANDS = ("models show MODEL", "models show MODEL --tensors", "plan MODEL", "convert MODEL --dry-run")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", FILES)
def test_a_hostile_model_writes_plain_text(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, command: str) -> None:
    model = str(FILES[kind](tmp_path))
    execute([model if word == "MODEL" else word for word in command.split()])
    found = capsys.readouterr()
    assert found.out or found.err
    assert_plain(found.out + found.err)


def assert_plain(text: str) -> None:
    assert text.replace("\n", "").isprintable(), ascii(text)
    assert "Traceback" not in text
    assert max(map(len, text.split("\n"))) <= MAX_MESSAGE + 100


def test_a_hostile_adapter_is_refused_in_plain_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from windlass.cli.serve import adapter_check

    folder = tmp_path / "tone"
    folder.mkdir()
    header = json.dumps(
        {f"base_model.model.{LONG}.lora_A.weight": {"dtype": "F32", "shape": [4, 1], "data_offsets": [0, 16]}}
    ).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [EVIL]})
    )
    monkeypatch.setattr(sys, "argv", ["", str(find_bundled("tiny-glm")), str(folder)])
    assert adapter_check.main() == adapter_check.PROBLEM
    said = capsys.readouterr().out
    assert_plain(said)
    assert "is not a matrix of this model" in said


def test_tables_keep_our_styles_and_nothing_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(f"[bold]note[/] {EVIL}")
    console().print("a [/b] c")
    found = capsys.readouterr().out
    assert_plain(found)
    assert "a [/b] c" in found

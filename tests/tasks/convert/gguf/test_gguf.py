"""GGUF files that are written: read back by our reader and by gguf-py, with the numbers that their blocks allow."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from windlass.errors import BadInput, Impossible
from windlass.model.formats.gguf.blocks import dequantize
from windlass.model.formats.gguf.encode import encode
from windlass.model.formats.gguf.header import TYPES
from windlass.model.formats.gguf.writer import NUMBERS
from windlass.runtime.weights.source import open_source
from windlass.tasks.convert.gguf.convert import to_gguf
from windlass.tasks.convert.gguf.recipe import block_type

pytestmark = pytest.mark.cpu

TESTS = Path(__file__).parents[3]


def beside(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gguf_store_tests", TESTS / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def decoded(rows: torch.Tensor, kind: str) -> torch.Tensor:
    blocks = torch.from_numpy(encode(rows, kind).copy()).view(-1, TYPES[NUMBERS[kind]].num_bytes)
    return dequantize(kind, blocks).view(rows.shape)


# --- blocks


@pytest.mark.parametrize(
    ("kind", "error"), [("F32", 0.0), ("F16", 3e-4), ("Q8_0", 0.006), ("Q4_0", 0.11), ("Q4_K", 0.075), ("Q6_K", 0.02)]
)
def test_blocks_keep_the_numbers(kind: str, error: float) -> None:
    """Relative RMS error of normal weights: bounds a little above what ggml's own quantizers reach."""
    rows = torch.randn(16, 1024, generator=torch.Generator().manual_seed(0))
    found = decoded(rows, kind)
    assert float((found - rows).square().mean().sqrt() / rows.square().mean().sqrt()) <= error


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q6_K"])
def test_blocks_of_zeros_and_of_one_value(kind: str) -> None:
    rows = torch.zeros(2, 256)
    assert torch.equal(decoded(rows, kind), rows)
    rows[1, :] = -0.5
    assert torch.allclose(decoded(rows, kind), rows, atol=0.01)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q6_K"])
def test_another_reader_finds_the_same_numbers(kind: str) -> None:
    quants = pytest.importorskip("gguf.quants")
    gguf = pytest.importorskip("gguf")
    rows = torch.randn(4, 512, generator=torch.Generator().manual_seed(1))
    data = encode(rows, kind)
    theirs = quants.dequantize(data.reshape(4, -1), gguf.GGMLQuantizationType[kind])
    assert np.allclose(theirs, decoded(rows, kind).numpy(), rtol=0, atol=1e-6)


def test_weights_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(BadInput, match="NaN"):
        encode(torch.tensor([[float("nan")] * 32]), "Q8_0")


# --- which tensor gets which type


@pytest.mark.parametrize(
    ("name", "shape", "kind", "expected"),
    [
        ("blk.0.attn_norm.weight", (64,), "Q8_0", "F32"),
        ("blk.0.ffn_gate_inp.weight", (8, 512), "Q4_0", "F32"),
        ("blk.5.attn_q.weight", (512, 512), "Q4_K_M", "Q4_K"),
        ("blk.0.attn_v.weight", (512, 512), "Q4_K_M", "Q6_K"),
        ("blk.4.ffn_down.weight", (512, 512), "Q4_K_M", "Q4_K"),
        ("blk.0.attn_q.weight", (512, 576), "Q4_K_M", "Q8_0"),  # 576 is no multiple of 256
        ("blk.0.attn_q.weight", (512, 40), "Q4_0", "F16"),
        ("output.weight", (1000, 512), "Q4_K_M", "Q6_K"),
        ("token_embd.weight", (1000, 512), "Q4_0", "Q4_0"),
    ],
)
def test_types(name: str, shape: tuple[int, ...], kind: str, expected: str) -> None:
    assert block_type(name, shape, kind, 24, tied_head=False) == expected


def test_a_tied_head_is_stored_as_a_head() -> None:
    assert block_type("token_embd.weight", (1000, 512), "Q4_K_M", 24, tied_head=True) == "Q6_K"


# --- whole models


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3moe", "glm4moe"])
def test_every_architecture_is_written_as_it_was_read(name: str, tmp_path: Path) -> None:
    """From a GGUF file of another writer, in F32, to Q8_0 and back: the same description, and the numbers of Q8_0."""
    theirs = beside("runtime/weights/stores/test_gguf.py")
    config = theirs.small_config(name)
    tensors = theirs.expected_tensors(config)
    first = theirs.write_gguf(tmp_path / "first.gguf", name, config, tensors)
    opened = open_source(first)
    made = to_gguf(opened, tmp_path / "second.gguf", "Q8_0", lambda total: lambda done: None)
    again = open_source(Path(made.model))
    assert _shape(again.spec) == _shape(opened.spec)
    for tensor in again.store.names():
        rows = opened.store.shape(tensor)[0]
        before, after = opened.store.read(tensor, 0, rows), again.store.read(tensor, 0, rows)
        assert torch.allclose(before, after, atol=float(before.abs().max()) / 120), tensor
    opened.store.close()
    again.store.close()
    assert not list(tmp_path.glob("*.partial"))


def _shape(spec: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(spec, name="", next_token=None, head_copy=False)


def test_the_bundled_model_keeps_its_tokenizer(tmp_path: Path) -> None:
    """From a quantized directory: its vocabulary, its stop tokens and its chat template are in the file."""
    from windlass.model.bundled.models import find_bundled
    from windlass.runtime.weights.text.files import model_text

    source = find_bundled("tiny-glm")
    assert source is not None
    made = to_gguf(open_source(source), tmp_path, "Q8_0", lambda total: lambda done: None)
    ours, theirs = model_text(source), model_text(Path(made.model))
    text = "def sort(numbers):\n    return sorted(numbers)  # 12, 345"
    assert theirs.tokenizer.encode(text) == ours.tokenizer.encode(text)
    assert theirs.chat_template == ours.chat_template
    assert set(theirs.stop_ids) == set(ours.stop_ids)


def test_refusals(tmp_path: Path) -> None:
    from windlass.model.bundled.models import find_bundled
    from windlass.model.families.gguf.write import write_architecture
    from windlass.model.families.registry import find, spec_of

    source = find_bundled("tiny-glm")
    assert source is not None
    (tmp_path / "there.gguf").write_text("")
    with pytest.raises(BadInput, match="already exists"):
        to_gguf(open_source(source), tmp_path / "there.gguf", "Q8_0", lambda total: lambda done: None)
    with pytest.raises(BadInput, match="Q4_K_M"):
        to_gguf(open_source(source), tmp_path / "x.gguf", "Q3_K", lambda total: lambda done: None)
    known = find("Falcon-40B")
    assert known is not None
    with pytest.raises(Impossible, match="cannot be written"):
        write_architecture(spec_of(known))

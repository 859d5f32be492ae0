"""Checkpoint directories: configs, indexes and headers, whole and damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windlass.errors import BadInput
from windlass.model.families import describe, hints_from
from windlass.model.formats.checkpoint import digest, tensor_names
from windlass.model.formats.config import read_config

pytestmark = pytest.mark.pure

AIR = {
    "model_type": "glm4_moe",
    "vocab_size": 64,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
AIR |= {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
}
AIR |= {"num_experts_per_tok": 2, "max_position_embeddings": 64, "num_nextn_predict_layers": 1}


def header(*names: str) -> bytes:
    entries = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * index, 4 * index + 4]} for index, name in enumerate(names)
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(4 * len(names))


def write_index(folder: Path, *names: str) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "model-1.safetensors")})
    )


# --- config.json


def test_config_of_a_folder_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_config(tmp_path) == read_config(tmp_path / "config.json") == {"model_type": "llama"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"not json",
        b"[1, 2]",
        b'"text"',
        b"\xff\xfe",
        b'{"a": 1e999}',
        b'{"a": NaN}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
    ],
    ids=["empty", "cut short", "text", "a list", "a string", "not UTF-8", "infinite", "NaN", "endless", "deep"],
)
def test_config_that_is_no_object(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(BadInput) as caught:
        read_config(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has no config\.json"):
        read_config(tmp_path)
    with pytest.raises(BadInput, match=r"has no config\.json"):
        read_config(tmp_path / "absent")


# --- names


def test_names_from_one_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(header("a.weight", "b.weight"))
    assert tensor_names(tmp_path) == {"a.weight", "b.weight"}


def test_names_from_several_files(tmp_path: Path) -> None:
    """GLM-4.6 shipped its MTP layer in a file of another name."""
    (tmp_path / "model-1.safetensors").write_bytes(header("a"))
    (tmp_path / "mtp.safetensors").write_bytes(header("b"))
    assert tensor_names(tmp_path) == {"a", "b"}


def test_names_from_the_index(tmp_path: Path) -> None:
    """The files themselves need not be there yet."""
    write_index(tmp_path, "a", "b")
    assert tensor_names(tmp_path) == {"a", "b"}


def test_no_weights_no_names(tmp_path: Path) -> None:
    assert tensor_names(tmp_path) == frozenset()
    assert tensor_names(tmp_path / "config.json") == frozenset()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"{",
        b'{"weight_map": []}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": null}',
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_damaged_index(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(BadInput, match="is not a safetensors index"):
        tensor_names(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x02\x00",
        (10**18).to_bytes(8, "little") + b"{}",
        (2**64 - 1).to_bytes(8, "little") + b"{}",
        (3).to_bytes(8, "little") + b"{}",
        (0).to_bytes(8, "little"),
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{x",
        (4).to_bytes(8, "little") + b"\xff\xfe\xfd\xfc",
        (200_000).to_bytes(8, "little") + b"[" * 200_000,
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
    ],
    ids=["empty", "cut short", "huge", "huger", "past the end", "none", "a list", "not JSON", "not UTF-8", "deep", "a pointer"],
)
def test_damaged_header(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(BadInput, match=r"model\.safetensors"):
        tensor_names(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=64) | st.binary(max_size=40).map(lambda body: len(body).to_bytes(8, "little") + body))
def test_any_bytes_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    try:
        assert all(isinstance(name, str) for name in tensor_names(tmp_path))
    except BadInput as error:
        assert "\n" not in str(error)


# --- what the names say


@pytest.mark.parametrize(
    ("names", "layer", "own"),
    [
        (["model.layers.1.mlp.gate.weight"], False, None),
        (["model.layers.2.eh_proj.weight"], True, False),
        (["model.layers.2.eh_proj.weight", "model.layers.2.embed_tokens.weight"], True, True),
    ],
    ids=["claimed and absent (INTELLECT-3.1)", "slim (GLM-4.6)", "with copies (GLM-4.5)"],
)
def test_a_claimed_next_token_layer(tmp_path: Path, names: list[str], layer: bool, own: bool | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(AIR))
    write_index(tmp_path, "lm_head.weight", *names)
    spec = describe(read_config(tmp_path), hints=hints_from(tensor_names(tmp_path), 2))
    assert (spec.next_token is not None) == layer
    assert spec.next_token is None or spec.next_token.own_embeddings == own


def test_a_folder_without_weights_is_as_its_config_says(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(AIR))
    spec = describe(read_config(tmp_path), hints=hints_from(tensor_names(tmp_path), 2))
    assert spec.next_token is not None and spec.next_token.own_embeddings


# --- digest


def test_digest_follows_the_content(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    alone = digest(tmp_path)
    assert len(alone) == 64
    write_index(tmp_path, "a")
    indexed = digest(tmp_path)
    assert indexed != alone
    write_index(tmp_path, "b")
    assert digest(tmp_path) not in (alone, indexed)
    assert digest(tmp_path / "config.json") == alone


def test_digest_follows_the_header_of_a_single_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(header("a"))
    before = digest(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(header("b"))
    assert digest(tmp_path) != before

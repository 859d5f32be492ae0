"""Small sound models of every format, made by code, and their bytes cut into parts."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fuzz.mutate import Sample
from windlass.core.rule import Rule, stored_tensors
from windlass.model import families

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-05, "num_hidden_layers": 1,
    "intermediate_size": 32, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu", "eos_token_id": [257],
}  # fmt: skip


@cache
def rules() -> tuple[Rule, ...]:
    return families.rules(families.describe(CONFIG))


def byte_characters() -> list[str]:
    """GPT-2's: printable bytes are themselves, the others characters from 256 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]


def tokenizer_json() -> dict[str, Any]:
    vocabulary = {character: number for number, character in enumerate(byte_characters())}
    merges = [["h", "e"], ["l", "l"], ["he", "ll"], ["Ġ", "w"]]
    vocabulary |= {first + second: 260 + number for number, (first, second) in enumerate(merges)}
    special = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [
            {"id": 256 + number, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True} for number, text in enumerate(special)
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]},
        "post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}],
                           "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": {}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocabulary, "merges": merges},
    }  # fmt: skip


TOKENIZER_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 128, "bos_token": None, "eos_token": {"content": "<|im_end|>"},
    "add_bos_token": False, "chat_template": [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": TEMPLATE}],
    "added_tokens_decoder": {"256": {"content": "<|im_start|>", "special": True}}, "clean_up_tokenization_spaces": False,
}  # fmt: skip
GENERATION_CONFIG: dict[str, Any] = {
    "do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1, "eos_token_id": [257, 256], "bos_token_id": 1
}  # fmt: skip


def write_text(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("config.json", CONFIG),
        ("tokenizer.json", tokenizer_json()),
        ("tokenizer_config.json", TOKENIZER_CONFIG),
        ("generation_config.json", GENERATION_CONFIG),
    ):
        (folder / name).write_text(json.dumps(content))


def write_model(folder: Path) -> Path:
    """A Hugging Face directory."""
    import torch
    from safetensors.torch import save_file

    write_text(folder)
    chance = torch.Generator().manual_seed(0)
    tensors = {one.name: torch.randn(one.shape, generator=chance).bfloat16() for one in stored_tensors(rules())}
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_index(folder: Path) -> bytes:
    """Of a model that is one file."""
    names = [one.name for one in stored_tensors(rules())]
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "model.safetensors")}).encode()


def gguf_file(folder: Path, kind: str) -> bytes:
    from windlass.runtime.weights.source import open_source
    from windlass.tasks.convert.gguf.convert import to_gguf

    source = write_model(folder / f"for-gguf-{kind}")
    made = to_gguf(open_source(source), folder / f"{kind}.gguf", kind, lambda total: lambda done: None, jobs=1)
    return Path(made.model).read_bytes()


def dllama_files(folder: Path, quant: str) -> tuple[bytes, bytes]:
    """The .m and the .t."""
    from windlass.runtime.weights.source import open_source
    from windlass.tasks.convert.dllama.convert import to_dllama

    source = write_model(folder / f"for-dllama-{quant}")
    made = to_dllama(open_source(source), source, folder / f"{quant}.m", quant, 1, lambda total: lambda done: None)
    assert made.tokenizer is not None, made.notes
    return Path(made.model).read_bytes(), Path(made.tokenizer).read_bytes()


# --- bytes cut into parts

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of GGUF's value types."""


class _Cutter:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.parts: list[bytes] = []

    def take(self, count: int) -> bytes:
        part = self.data[self.at : self.at + count]
        self.at += count
        self.parts.append(part)
        return part

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def rest(self) -> Sample:
        self.take(len(self.data))
        return tuple(self.parts)


def cut_gguf(data: bytes) -> Sample:
    cut = _Cutter(data)
    cut.take(8)
    num_tensors, num_keys = cut.number(8), cut.number(8)

    def value(kind: int) -> None:
        if kind == 8:
            cut.take(cut.number(8))
        elif kind == 9:
            inner, count = cut.number(4), cut.number(8)
            for _ in range(count):
                value(inner)
        else:
            cut.take(_SIZES[kind])

    for _ in range(num_keys):
        cut.take(cut.number(8))
        value(cut.number(4))
    for _ in range(num_tensors):
        cut.take(cut.number(8))
        for _ in range(cut.number(4)):
            cut.number(8)
        cut.take(4)
        cut.take(8)
    return cut.rest()


def cut_pairs(data: bytes, most: int = 64) -> Sample:
    """Of Distributed Llama's files: integers of four bytes in the header, then the rest."""
    cut = _Cutter(data)
    cut.take(4)
    length = min(cut.number(4), 8 * most)
    for _ in range((length - 8) // 4):
        cut.take(4)
    return cut.rest()


def cut_safetensors(data: bytes) -> Sample:
    length = int.from_bytes(data[:8], "little")
    return data[:8], data[8 : 8 + length], data[8 + length :]


def cut_every(data: bytes, width: int) -> Sample:
    return tuple(data[at : at + width] for at in range(0, len(data), width))


def safetensors_bytes(tensors: dict[str, tuple[str, Sequence[int], bytes]], metadata: dict[str, str] | None = None) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    body = b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body

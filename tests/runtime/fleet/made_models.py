"""Checkpoints of random weights with a vocabulary of bytes: of any shape, whole enough to be converted, served and split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
import torch
from safetensors.torch import save_file

from windlass.core.rule import stored_tensors
from windlass.model.families import describe, rules
from windlass.model.text.tokenize.gguf_tokenizer import tokenizer_files

END = "<|stop|>"
VOCABULARY = 288
"""256 bytes and what ends a text, in a number that groups divide."""

WIDE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "eos_token_id": 256,
    "bos_token_id": None,
    "torch_dtype": "bfloat16",
}

NINE_HEADS: dict[str, Any] = {
    **WIDE,
    "hidden_size": 288,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 32,
}
"""Its heads are SmolLM2's: no number of ranks but three divides them."""

EXPERTS: dict[str, Any] = {
    **json.loads((Path(__file__).parents[2] / "model" / "families" / "tiny" / "glm4_moe.json").read_text()),
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "head_dim": 32,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "n_routed_experts": 6,
    "intermediate_size": 192,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "max_position_embeddings": 1024,
    "eos_token_id": 256,
    "torch_dtype": "bfloat16",
}


def wide(hidden: int, layers: int, ffn: int = 1024, heads: int = 12) -> dict[str, Any]:
    """As wide as a large model, and otherwise small."""
    return {
        **WIDE,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 32,
    }


def make(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """A Hugging Face directory in bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = torch.Generator().manual_seed(seed)
    tensors = {tensor.name: _random(tensor.name, tensor.shape, chance) for tensor in stored_tensors(rules(describe(config)))}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in tokenizer_files(_vocabulary()).items():
        (folder / name).write_bytes(msgspec.json.encode(content))
    return folder


def _vocabulary() -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), END],
        "tokenizer.ggml.token_type": [1] * 256 + [3],
    }


def _random(name: str, shape: tuple[int, ...], chance: torch.Generator) -> torch.Tensor:
    """Activations of about one, and nothing left at a neutral value."""
    drawn = torch.randn(shape, generator=chance)
    if len(shape) > 1:
        scale = 1.0 if "embed" in name else 1.3 * shape[-1] ** -0.5
        return (drawn * scale).to(torch.bfloat16)
    return (drawn * 0.1 + float(name.endswith("weight"))).to(torch.bfloat16)

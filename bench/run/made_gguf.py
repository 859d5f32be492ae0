"""Makes GGUF files with random weights in Q4_0, or in llama.cpp's mixture Q4_K_M, so that other engines and Windlass run the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy

from windlass.tasks.convert.gguf.recipe import block_type

BLOCK = numpy.dtype([("scale", "<f2"), ("codes", "u1", 16)])


@dataclass(frozen=True)
class Shape:
    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int = 32000
    experts: int = 0
    active: int = 0
    expert_ffn: int = 0
    mixture: str = ""
    """A key of convert.gguf.recipe.FILE_TYPES; else Q4_0 throughout."""


SHAPES = {
    "1.1B": Shape("dense-1.1B", 16, 2048, 8192, 32, 8, 64),
    "1.1B-Q4_K_M": Shape("dense-1.1B-Q4_K_M", 16, 2048, 8192, 32, 8, 64, mixture="Q4_K_M"),
    # A small GLM MoE: first layer dense, 32 experts with top 8, one shared expert, sigmoid router.
    "moe": Shape("moe-1.1B", 20, 1024, 4096, 16, 4, 64, experts=32, active=8, expert_ffn=512),
}


def make(shape: Shape, path: Path) -> None:
    arch = "glm4moe" if shape.experts else "llama"
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(shape.layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_rope_dimension_count(shape.head_dim // 2 if shape.experts else shape.head_dim)
    writer.add_tokenizer_model("none")
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.active)
        writer.add_expert_shared_count(1)
        writer.add_expert_feed_forward_length(shape.expert_ffn)
        writer.add_leading_dense_block_count(1)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(1.0)
    random = numpy.random.default_rng(0)
    _tensors(writer, shape, random)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def k_blocks(kind: str, sizes: tuple[int, ...], random: numpy.random.Generator) -> numpy.ndarray:
    """Random bytes, but for the block's numbers. Deviations: of random Q4_K about 256 times the scale, of Q6_K 1370 times."""
    num_bytes, at, deviation = {"Q4_K": (144, (0, 2), 256), "Q6_K": (210, (208,), 1370)}[kind]
    blocks = random.integers(0, 256, (*sizes[:-1], sizes[-1] // 256, num_bytes), dtype=numpy.uint8)
    for start in at:  # the minimum is 7.5 times the scale: that is the mean of the codes
        size = (7.5 if start == 2 else 1.0) / (deviation * sizes[-1] ** 0.5)
        scale = (random.uniform(0.8, 1.2, blocks.shape[:-1]) * size).astype("<f2")
        blocks[..., start : start + 2] = scale[..., None].view(numpy.uint8)
    return blocks.reshape(*sizes[:-1], -1)


def _tensors(writer: gguf.GGUFWriter, shape: Shape, random: numpy.random.Generator) -> None:
    def matrix(name: str, *sizes: int) -> None:
        kind = block_type(name, sizes, shape.mixture, shape.layers, False) if shape.mixture else "Q4_0"
        if kind != "Q4_0":
            raw_dtype = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, k_blocks(kind, sizes, random), raw_dtype=raw_dtype)
            return
        blocks = numpy.empty((*sizes[:-1], sizes[-1] // 32), dtype=BLOCK)
        # Uniform 4-bit codes have a standard deviation of 4.6; this preserves the variance of activations.
        blocks["scale"] = random.uniform(0.8, 1.2, blocks.shape) / (4.6 * sizes[-1] ** 0.5)
        blocks["codes"] = random.integers(0, 256, (*blocks.shape, 16), dtype=numpy.uint8)
        raw = blocks.view(numpy.uint8).reshape(*sizes[:-1], -1)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def vector(name: str, size: int, value: float = 1.0) -> None:
        writer.add_tensor(name, (value + 0.1 * random.standard_normal(size)).astype(numpy.float32))

    hidden, heads = shape.hidden, shape.heads * shape.head_dim
    matrix("token_embd.weight", shape.vocabulary, hidden)
    matrix("output.weight", shape.vocabulary, hidden)
    vector("output_norm.weight", hidden)
    for layer in range(shape.layers):
        here = f"blk.{layer}."
        vector(here + "attn_norm.weight", hidden)
        vector(here + ("post_attention_norm.weight" if shape.experts else "ffn_norm.weight"), hidden)
        for name, rows in (("q", heads), ("k", shape.kv_heads * shape.head_dim), ("v", shape.kv_heads * shape.head_dim)):
            matrix(f"{here}attn_{name}.weight", rows, hidden)
            if shape.experts:
                vector(f"{here}attn_{name}.bias", rows, 0.0)
        matrix(here + "attn_output.weight", hidden, heads)
        if not shape.experts or layer == 0:
            matrix(here + "ffn_gate.weight", shape.ffn, hidden)
            matrix(here + "ffn_up.weight", shape.ffn, hidden)
            matrix(here + "ffn_down.weight", hidden, shape.ffn)
            continue
        writer.add_tensor(
            here + "ffn_gate_inp.weight",
            (random.standard_normal((shape.experts, hidden)) / hidden**0.5).astype(numpy.float32),
        )
        vector(here + "exp_probs_b.bias", shape.experts, 0.0)
        for suffix, counts in (("exps", (shape.experts,)), ("shexp", ())):
            matrix(f"{here}ffn_gate_{suffix}.weight", *counts, shape.expert_ffn, hidden)
            matrix(f"{here}ffn_up_{suffix}.weight", *counts, shape.expert_ffn, hidden)
            matrix(f"{here}ffn_down_{suffix}.weight", *counts, hidden, shape.expert_ffn)

"""Reference writer of Distributed Llama's `.m` files in plain Python, to compare bytes and speed with.

Does what converter/convert-hf.py and converter/writer.py of Distributed Llama 0.16 do, at the same cost: one tensor at a time,
up-cast to float32, quantized with whole-tensor numpy arrays, packed block by block with struct. Shares no code with windlass.

    python bench/convert/dllama_reference.py [MILLION_PARAMETERS]     # its speed on this machine
"""

from __future__ import annotations

import io
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

import numpy as np
import torch

BLOCK = 32
TYPES = {"f32": 0, "f16": 1, "q40": 2, "q80": 3}


def write_header(file: BinaryIO, pairs: Sequence[tuple[int, int]]) -> None:
    data = b"".join(struct.pack("<ii", key, value) for key, value in pairs)
    file.write(struct.pack("<ii", 0x0A00ABCD, 8 + len(data)) + data)


def _blocks(tensor: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    blocks = tensor.to(torch.float32).numpy().astype(np.float32).reshape(-1, BLOCK)
    return blocks, np.max(blocks, axis=1), np.min(blocks, axis=1)


def _inverse(delta: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(delta != 0, 1.0 / delta, 0)


def write_q40(file: BinaryIO, tensor: torch.Tensor) -> None:
    blocks, high, low = _blocks(tensor)
    delta = np.divide(np.where(-low > high, low, high), -8)
    scale = delta.astype(np.float16)
    with np.errstate(invalid="ignore"):
        codes = np.clip(np.add(blocks * _inverse(delta)[:, np.newaxis], 8.5), 0, 15).astype(int)
    pairs = (codes[:, : BLOCK // 2] & 0xF) | (codes[:, BLOCK // 2 :] & 0xF) << 4
    for index in range(len(blocks)):
        file.write(struct.pack(f"<e{BLOCK // 2}B", scale[index], *pairs[index]))


def write_q80(file: BinaryIO, tensor: torch.Tensor) -> None:
    blocks, high, low = _blocks(tensor)
    delta = np.where(-low > high, -low, high) / 127
    scale = delta.astype(np.float16)
    with np.errstate(invalid="ignore"):
        codes = np.round(blocks * _inverse(delta)[:, np.newaxis]).astype(np.int8)
    for index in range(len(blocks)):
        file.write(struct.pack(f"<e{BLOCK}b", scale[index], *codes[index]))


def write_f32(file: BinaryIO, tensor: torch.Tensor, chunk: int = 10000) -> None:
    for start in range(0, len(tensor), chunk):
        values = tensor[start : start + chunk].to(torch.float32).numpy().astype(np.float32)
        file.write(struct.pack(f"<{len(values)}f", *values))


def write_f16(file: BinaryIO, tensor: torch.Tensor) -> None:
    values = tensor.to(torch.float16).numpy().astype(np.float16)
    file.write(struct.pack(f"<{len(values)}e", *values))


WRITERS: dict[str, Callable[[BinaryIO, torch.Tensor], None]] = {
    "f32": write_f32,
    "f16": write_f16,
    "q40": write_q40,
    "q80": write_q80,
}


def write_tensor(file: BinaryIO, tensor: torch.Tensor, kind: str) -> None:
    WRITERS[kind](file, tensor.detach().reshape(-1))


def permute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from halves to neighbouring pairs."""
    half = tensor.shape[0] // num_heads // 2
    return tensor.reshape(num_heads, 2, half, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def write_dense_model(
    file: BinaryIO,
    pairs: Sequence[tuple[int, int]],
    get: Callable[[str], torch.Tensor],
    shape: Mapping[str, int],
    kind: str,
    *,
    permuted: bool,
    qk_norm: bool,
) -> None:
    """A whole model without experts. `shape` has layers, heads and kv_heads; `get` gives a tensor by its Hugging Face name."""
    write_header(file, pairs)
    write_tensor(file, get("model.embed_tokens.weight"), "f32")
    for layer in range(shape["layers"]):
        prefix = f"model.layers.{layer}."
        query, key = get(f"{prefix}self_attn.q_proj.weight"), get(f"{prefix}self_attn.k_proj.weight")
        write_tensor(file, permute(query, shape["heads"]) if permuted else query, kind)
        write_tensor(file, permute(key, shape["kv_heads"]) if permuted else key, kind)
        for name in ("self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj", "mlp.up_proj"):
            write_tensor(file, get(f"{prefix}{name}.weight"), kind)
        norms = ("self_attn.q_norm", "self_attn.k_norm") if qk_norm else ()
        for name in (*norms, "input_layernorm", "post_attention_layernorm"):
            write_tensor(file, get(f"{prefix}{name}.weight"), "f32")
    write_tensor(file, get("model.norm.weight"), "f32")
    write_tensor(file, get("lm_head.weight"), kind)


class _Null(io.RawIOBase):
    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        return len(data)  # type: ignore[arg-type]


def main() -> None:
    num_rows = int(float(sys.argv[1]) * 1e6 / 2048) if len(sys.argv) > 1 else 2048
    tensor = torch.randn(num_rows, 2048, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for kind in ("q40", "q80"):
        start = time.perf_counter()
        write_tensor(io.BufferedWriter(_Null()), tensor, kind)
        seconds = time.perf_counter() - start
        print(f"{kind}: {tensor.numel() / seconds / 1e6:.1f} million parameters/s, {seconds:.2f} s for {tensor.numel():,}")


if __name__ == "__main__":
    main()

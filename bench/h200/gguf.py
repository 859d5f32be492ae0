"""GGUF's block types on a real GPU: codes and scales exact, how fast, and as much memory as was said.

Run: PYTHONPATH=src python bench/h200/gguf.py [exact|fast|memory ...] [FILE.gguf ...] (all by default)

exact   unit vectors times a matrix of every type give its numbers, those of the reference, bit for bit, or (types with minima, of which the
        product and the sum may round once) within one unit of the last place; and random rows equal the reference in fp64
fast    microseconds and GB/s at the shapes of Llama-70B; packed bytes are counted, which is what a step has to read
memory  what the plan and the loader say of FILE.gguf, or of files that it makes, and what the allocator gave (gguf_memory.py)
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "runtime" / "kernels" / "triton"))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from gguf_memory import compare_all
from triton_kernels import copies, said, seconds

from windlass.core.ggml.forms import FORMS
from windlass.runtime.kernels.packing.packed_rows import PackedRows
from windlass.runtime.kernels.triton import ops

SHAPES = {"Llama-70B qkv": (10240, 8192), "Llama-70B down": (8192, 28672)}
MINIMA = ("q2_k", "q4_k", "q5_k", "q5_1")


def made(kind: str, num_out: int, num_in: int, seed: int = 0) -> PackedRows:
    return PackedRows.random(kind, num_out, num_in, FORMS[kind].elements, 0, torch.float16, "cuda", deviation=0.02, seed=seed)


def exact() -> int:
    failed = 0
    for kind in FORMS:
        weight = made(kind, 200, 512, seed=1)
        wanted = weight.dense()
        on_cpu = PackedRows(kind, weight.shape, weight.group, weight.data.cpu(), weight.scale.cpu(), None).dense()
        units = torch.eye(512, device="cuda", dtype=torch.bfloat16)
        found = ops.linear(units, weight, None, torch.zeros(512, 200, device="cuda")).T
        scale = wanted.abs().max()
        unequal = (found != wanted).sum().item()
        worst = ((found - wanted).abs().max() / scale).item()
        x = torch.randn(33, 512, device="cuda", dtype=torch.bfloat16)
        product = ops.linear(x, weight, None, torch.zeros(33, 200, device="cuda"))
        error = ((product - x.double() @ wanted.double().T).abs().max() / scale).item()
        is_right = torch.equal(wanted.cpu(), on_cpu) and worst <= (1e-6 if kind in MINIMA else 0.0) and error < 1e-4
        failed += not is_right
        print(
            f"{kind:8} {'ok' if is_right else 'FAILED'}: {unequal} of {found.numel()} numbers differ, by {worst:.1e}; products by {error:.1e}"
        )
    return failed


def fast() -> int:
    for name, (num_out, num_in) in SHAPES.items():
        for kind in FORMS:
            first = made(kind, num_out, num_in)
            weights = [first, *(made(kind, num_out, num_in, seed) for seed in range(1, copies(first.nbytes)))]
            for rows in (1, 8, 64, 2048):
                x = torch.randn(rows, num_in, device="cuda", dtype=torch.bfloat16)
                taken = seconds([lambda w=w, x=x: ops.linear(x, w) for w in weights])
                many = rows > 64
                said(f"{name} {kind} {rows}", taken, 0 if many else first.nbytes, 2 * rows * num_out * num_in if many else 0)
    return 0


def main() -> int:
    words = sys.argv[1:]
    files = [Path(word) for word in words if word.endswith(".gguf")]
    chosen = [word for word in words if not word.endswith(".gguf")] or ["exact", "fast", "memory"]
    checks = {"exact": exact, "fast": fast, "memory": lambda: compare_all(files, "cuda", "1xH200", small=False)}
    failed = sum(checks[name]() for name in chosen)
    print("all right" if not failed else f"{failed} FAILED")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())

"""Whether warpgroup products and other instructions run beside each other: one warpgroup only multiplies, another only computes.

Prints the clock cycles of a product and of an instruction, alone and beside each other (docs/reference/cuda-notes.md, 40).
Needs nvcc and a Hopper GPU.
Run: python bench/h200/ports.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

INSTRUCTIONS = {
    "FFMA, three registers": "v[i] = fmaf(v[(i + 5) % 16], w[i % 8], v[i]);",
    "FFMA, two operands reused": "v[i] = fmaf(v[i], a, b);",
    "FMUL": "v[i] = v[i] * a;",
    "LOP3": 'asm volatile("lop3.b32 %0, %0, %1, %2, 0x6a;" : "+r"(u[i]) : "r"(ua), "r"(ub));',
    "IMAD": 'asm volatile("mad.lo.u32 %0, %0, %1, %2;" : "+r"(u[i]) : "r"(ua), "r"(ub));',
}


@dataclass(frozen=True)
class Product:
    """m64 by `columns`; the left operand from registers or from shared memory."""

    types: str
    columns: int
    from_registers: bool

    @property
    def inputs(self) -> int:
        return 16 if "16" in self.types.split(".")[1] else 32

    @property
    def sums(self) -> int:
        """Registers of a thread."""
        return self.columns // (4 if self.types.startswith("f16") else 2)

    @property
    def holds_floats(self) -> bool:
        return self.types.startswith("f32")

    def text(self) -> str:
        """The instruction: c += weights x rows."""
        count, left = self.sums, 4 if self.from_registers else 1
        names = ",".join(f"%{i}" for i in range(count))
        weights = "{%" + ",%".join(str(count + i) for i in range(4)) + "}" if self.from_registers else f"%{count}"
        signs = "" if self.types.startswith("s32") else ", 1, 1"
        orders = "" if self.inputs == 32 else ", 0" if self.from_registers else ", 0, 0"
        kept = ", ".join(f'"+{"f" if self.holds_floats else "r"}"(c[{i}])' for i in range(count))
        given = ", ".join(f'"r"(f[{i}])' for i in range(4)) if self.from_registers else '"l"(ad)'
        return (
            f'asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + left + 1}, 0; wgmma.mma_async.sync.aligned.m64n{self.columns}k{self.inputs}.'
            f'{self.types} {{{names}}}, {weights}, %{count + left}, p{signs}{orders}; }}" : {kept} : {given}, "l"(bd), "r"(add));'
        )


PRODUCTS = (
    Product("s32.s8.s8", 64, True),
    Product("s32.s8.s8", 64, False),
    Product("s32.s8.s8", 128, True),
    Product("s32.s8.s8", 256, True),
    Product("f32.bf16.bf16", 64, True),
    Product("f16.f16.f16", 64, True),
    Product("f32.e4m3.e4m3", 64, True),
)
HEADER = """#include <cstdio>
#include <cstdint>
#include <cuda_runtime.h>
typedef uint32_t u32; typedef uint64_t u64; typedef uint8_t u8;
__device__ __forceinline__ u64 descriptor(u32 address) { return (u64)((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }
"""
KERNEL = """
__global__ void __launch_bounds__(256, 1) NAME(u32 mode, u32 products, u32 rounds, u64* res, float* sink) {
    extern __shared__ __align__(1024) u8 memory[];
    const u32 tid = threadIdx.x;
    u32 x = tid * 2654435761u;
    for (u32 i = tid; i < 128 * 1024 / 4; i += 256) { x = x * 1664525u + 1013904223u; ((u32*)memory)[i] = FILL; }
    __syncthreads();
    const u32 base = (u32)__cvta_generic_to_shared(memory);
    if (tid < 128) {
        SUM c[SUMS]; for (int i = 0; i < SUMS; i++) c[i] = 0;
        u32 f[4] = {0x01020304u * (tid & 7), 0x04030201u, 0x02020202u, 0x01010101u};
        u64 bd = descriptor(base), ad = descriptor(base + 65536); u32 add = 1;
        if (mode == 1) return;
        u64 t0 = clock64(); u64 n = 0;
#pragma unroll 1
        for (u32 r = 0; r < products; r++) {
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < 16; k++) { PRODUCT }
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            n += 16;
        }
        u64 t1 = clock64();
        if (tid == 0 && blockIdx.x == 0) res[0] = t1 - t0, res[1] = n;
        float s = 0; for (int i = 0; i < SUMS; i++) s += (float)c[i];
        if (s == 123.5f) sink[tid] = s;
    } else {
        if (mode == 0) return;
        float v[16], w[8], a = __int_as_float(0x3f800001), b = tid * 1e-9f; u32 u[16], ua = tid, ub = tid * 7;
        for (int i = 0; i < 16; i++) v[i] = tid + i, u[i] = tid * i;
        for (int i = 0; i < 8; i++) w[i] = tid * 0.001f + i;
        u64 t0 = clock64();
#pragma unroll 1
        for (u32 r = 0; r < rounds; r++) {
#pragma unroll
            for (int z = 0; z < 8; z++)
#pragma unroll
                for (int i = 0; i < 16; i++) { INSTRUCTION }
        }
        u64 t1 = clock64();
        if (tid == 128 && blockIdx.x == 0) res[2] = t1 - t0;
        float s = 0; for (int i = 0; i < 16; i++) s += v[i] + u[i];
        if (s == 123.5f) sink[tid] = s;
    }
}"""
CALL = """{ cudaFuncSetAttribute(NAME, cudaFuncAttributeMaxDynamicSharedMemorySize, 132 * 1024);
    auto go = [&](u32 mode, u32 products, u32 rounds) {
        cudaMemset(res, 0, 24); NAME<<<132, 256, 132 * 1024>>>(mode, products, rounds, res, sink); cudaMemcpy(h, res, 24, cudaMemcpyDeviceToHost); };
    go(0, 500, 0); double product = (double)h[0] / h[1]; go(1, 0, 300); double alone = h[2] / (300. * 128);
    go(2, 6000, 300); double beside = h[2] / (300. * 128); go(2, 300, 6000);
    printf("TOLD | %.1f / %.1f | %.2f / %.2f | %s\\n", product, (double)h[0] / h[1], alone, beside, cudaGetErrorString(cudaGetLastError())); }"""


def program() -> str:
    kernels, calls = list[str](), list[str]()
    for number, product in enumerate(PRODUCTS):
        for which, (name, instruction) in enumerate(INSTRUCTIONS.items()):
            fill = "x" if product.types.startswith("s32") else "x & 0x3f3f3f3f"
            told = f"{product.types} n{product.columns} {'registers' if product.from_registers else 'shared':9} | {name:25}"
            words = {
                "NAME": f"run_{number}_{which}", "FILL": fill, "SUMS": str(product.sums), "SUM": "float" if product.holds_floats else "u32",
                "PRODUCT": product.text(), "INSTRUCTION": instruction, "TOLD": told,
            }  # fmt: skip
            kernels.append(_filled(KERNEL, words))
            calls.append(_filled(CALL, words))
    main = "int main() { u64* res; float* sink; cudaMalloc(&res, 64); cudaMalloc(&sink, 4096); u64 h[3];"
    return "\n".join((HEADER, *kernels, main, *calls, "return 0; }"))


def _filled(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(word, value)
    return text


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "ports.cu", Path(folder) / "ports"
        source.write_text(program())
        subprocess.run(
            ["nvcc", "-w", "-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-o", binary, source], check=True
        )
        print("product | instruction | cycles of a product alone / beside | of an instruction alone / beside |", flush=True)
        return subprocess.run([binary]).returncode


if __name__ == "__main__":
    sys.exit(main())

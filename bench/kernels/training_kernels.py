"""What the kernels of a training step reach on this GPU: products at training shapes, traffic-bound passes, attention, whole layers.

The planner's cost model (tasks/plan/training/time/layer.py) takes its derating factors from this script's output, which is kept in
docs/reference/plan.md with the device and the date. Needs torch and a CUDA device. Run: python bench/kernels/training_kernels.py
"""

# ruff: noqa: B023 (every closure is called before its loop goes on)

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as functional

SHAPES = {
    # name: (tokens, inputs, outputs) on one rank
    "cube 8192": (8192, 8192, 8192),
    "405B tp8 qkv": (8192, 16384, 2304),
    "405B tp8 out": (8192, 2048, 16384),
    "405B tp8 up": (8192, 16384, 13312),
    "405B tp8 down": (8192, 6656, 16384),
    "70B tp4 qkv": (8192, 8192, 2560),
    "70B tp4 out": (8192, 2048, 8192),
    "70B tp4 up": (8192, 8192, 14336),
    "70B tp4 down": (8192, 7168, 8192),
    "8B qkv": (8192, 4096, 6144),
    "8B out": (8192, 4096, 4096),
    "8B up": (8192, 4096, 28672),
    "8B down": (8192, 14336, 4096),
    "8B head": (8192, 4096, 128256),
    "175B tp8 qkv": (2048, 12288, 4608),
    "175B tp8 out": (2048, 1536, 12288),
    "175B tp8 up": (2048, 12288, 6144),
    "175B tp8 down": (2048, 6144, 12288),
}


def seconds(call: Callable[[], object], at_least: float = 0.25) -> float:
    """Mean over a sustained run, so that clocks settle where power lets them."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    times = max(3, int(at_least / (start.elapsed_time(stop) / 1e3 + 1e-6)))
    start.record()
    for _ in range(times):
        call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3 / times


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def products() -> None:
    for name, (tokens, inputs, outputs) in SHAPES.items():
        x, w, dy = normal(tokens, inputs), normal(outputs, inputs), normal(tokens, outputs)
        flops = 2 * tokens * inputs * outputs
        rates = [flops / seconds(call) / 1e12 for call in (lambda: x @ w.t(), lambda: dy @ w, lambda: dy.t() @ x)]
        print(f"bf16  {name:16s} forward {rates[0]:6.0f}  dgrad {rates[1]:6.0f}  wgrad {rates[2]:6.0f} TFLOP/s", flush=True)


def products_fp8() -> None:
    one = torch.ones((), device="cuda")
    for name, (tokens, inputs, outputs) in SHAPES.items():
        x, w = normal(tokens, inputs).to(torch.float8_e4m3fn), normal(outputs, inputs).to(torch.float8_e4m3fn)
        taken = seconds(
            lambda: torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
        )
        print(f"fp8   {name:16s} {2 * tokens * inputs * outputs / taken / 1e12:6.0f} TFLOP/s", flush=True)


def passes() -> None:
    for mib in (16, 64, 256, 1024):
        count = mib * 2**20 // 2
        a, b, c = normal(count), normal(count), normal(count)
        add = 6 * count / seconds(lambda: torch.add(a, b, out=c)) / 1e9
        copy = 4 * count / seconds(lambda: c.copy_(a)) / 1e9
        print(f"pass  {mib:5d} MiB  add {add:6.0f}  copy {copy:6.0f} GB/s", flush=True)
    x, weight = normal(8192, 8192).requires_grad_(), normal(8192).requires_grad_()
    y = functional.layer_norm(x, (8192,), weight)
    g = torch.randn_like(y)
    forward = 4 * x.numel() / seconds(lambda: functional.layer_norm(x, (8192,), weight)) / 1e9
    backward = 6 * x.numel() / seconds(lambda: torch.autograd.grad(y, (x, weight), g, retain_graph=True)) / 1e9
    print(f"pass  layer norm 8192x8192 forward {forward:.0f} backward {backward:.0f} GB/s (counted 4 and 6 bytes)", flush=True)


def attention() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        for batch, length in ((8, 2048), (4, 4096), (2, 8192), (1, 32768)):
            q, k, v = (normal(batch, 16, length, 128).requires_grad_() for _ in range(3))
            flops = 2 * 2 * batch * 16 * 128 * length * length / 2
            try:
                with sdpa_kernel(backend):
                    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                    g = torch.randn_like(out)
                    ahead = flops / seconds(lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True)) / 1e12
                    back = 2.5 * flops / seconds(lambda: torch.autograd.grad(out, (q, k, v), g, retain_graph=True)) / 1e12
                print(
                    f"flash {backend.name:16s} {batch}x{length:6d} forward {ahead:5.0f} backward {back:5.0f} TFLOP/s", flush=True
                )
            except RuntimeError as error:
                print(f"flash {backend.name} {length}: {str(error)[:80]}", flush=True)


class Block(torch.nn.Module):
    """A gated, grouped-query layer at the sizes one rank holds."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        made = [
            torch.nn.Linear(i, o, bias=False)
            for i, o in ((hidden, (heads + 2 * kv_heads) * 128), (heads * 128, hidden), (hidden, 2 * ffn), (ffn, hidden))
        ]
        self.qkv, self.out, self.up, self.down = made
        self.norm1, self.norm2 = torch.nn.RMSNorm(hidden), torch.nn.RMSNorm(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, -1, 128).transpose(1, 2)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


BLOCKS = {
    "8B": (4096, 32, 8, 14336, 1, 8192),
    "70B tp4": (8192, 16, 2, 7168, 1, 8192),
    "405B tp8": (16384, 16, 1, 6656, 1, 8192),
    "1B": (2048, 16, 8, 8192, 4, 4096),
}


def blocks() -> None:
    for name, (hidden, heads, kv_heads, ffn, batch, length) in BLOCKS.items():
        for compiled in (False, True):
            block = Block(hidden, heads, kv_heads, ffn).to("cuda", torch.bfloat16)
            call = torch.compile(block) if compiled else block
            x = normal(batch, length, hidden).requires_grad_()
            g = normal(batch, length, hidden)

            def step() -> None:
                call(x).backward(g)

            both = seconds(step, 0.6)
            with torch.no_grad():
                ahead = seconds(lambda: call(x), 0.3)
            print(
                "block " + json.dumps({"name": name, "compiled": compiled, "forward_ms": ahead * 1e3, "step_ms": both * 1e3}),
                flush=True,
            )


EXPERTS = {
    # name: (experts on the rank, rows each, hidden, intermediate)
    "30B-A3B ep16": (8, 4096, 2048, 768),
    "235B ep32": (4, 4096, 4096, 1536),
    "671B ep64": (4, 4096, 7168, 2048),
    "106B ep8": (16, 2048, 4096, 1408),
    "106B ep1": (128, 512, 4096, 1408),
    "small 32": (32, 2048, 2048, 1024),
    "small 64": (64, 512, 2048, 1024),
}


def grouped() -> None:
    """Products of routed experts, the rows spread unevenly (a tenth) as a balanced router leaves them."""
    for name, (experts, each, hidden, width) in EXPERTS.items():
        sizes = (each * (1 + 0.1 * torch.randn(experts))).clamp(min=16).round().to(torch.int32)
        offsets = sizes.cumsum(0).to(torch.int32).cuda()
        rows = int(offsets[-1])
        x, dy = normal(rows, hidden), normal(rows, 2 * width)
        w = normal(experts, hidden, 2 * width)
        flops = 2 * rows * hidden * 2 * width
        calls = {
            "forward": lambda: torch._grouped_mm(x, w, offs=offsets),
            "dgrad": lambda: torch._grouped_mm(dy, w.transpose(-2, -1), offs=offsets),
            "wgrad": lambda: torch._grouped_mm(x.t(), dy, offs=offsets),
        }
        told = " ".join(f"{what} {flops / seconds(call) / 1e12:5.0f}" for what, call in calls.items())
        print(f"group {name:14s} rows {rows:6d} {told} TFLOP/s", flush=True)


def permutes() -> None:
    for rows, hidden in ((32768, 2048), (32768, 4096), (16384, 7168)):
        tokens = rows // 8
        x, out = normal(tokens, hidden), normal(rows, hidden)
        order = torch.randperm(rows, device="cuda") // 8
        gather = 4 * rows * hidden / seconds(lambda: x[order]) / 1e9
        back = torch.zeros(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        scatter = 4 * rows * hidden / seconds(lambda: back.index_add_(0, order, out)) / 1e9
        inverse = torch.randperm(rows, device="cuda")
        summed = 4 * rows * hidden / seconds(lambda: out[inverse].view(tokens, 8, hidden).sum(1)) / 1e9
        print(
            f"perm  {rows}x{hidden} gather {gather:.0f} index_add {scatter:.0f} gather+sum {summed:.0f} GB/s (4 bytes counted)",
            flush=True,
        )


class Experts(torch.nn.Module):
    """Router in fp32, tokens sorted by expert, grouped products, weighed and summed back."""

    def __init__(self, hidden: int, width: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen, self.experts = chosen, experts
        self.router = torch.nn.Parameter(torch.randn(experts, hidden) / hidden**0.5)
        self.up = torch.nn.Parameter(normal(experts, hidden, 2 * width) / hidden**0.5)
        self.down = torch.nn.Parameter(normal(experts, width, hidden) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.sigmoid(x.float() @ self.router.t())
        weight, choice = scores.topk(self.chosen, dim=-1)
        weight = (weight / weight.sum(-1, keepdim=True)).to(x.dtype)
        order = choice.flatten().argsort()
        offsets = torch.bincount(choice.flatten(), minlength=self.experts).cumsum(0).to(torch.int32)
        rows = x[order // self.chosen]
        gate, up = torch._grouped_mm(rows, self.up, offs=offsets).chunk(2, dim=-1)
        out = torch._grouped_mm(functional.silu(gate) * up * weight.flatten()[order].unsqueeze(-1), self.down, offs=offsets)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        return out[back].view(x.shape[0], self.chosen, -1).sum(1)


ROUTED = {
    "32 of 2048x1024 top 4": (2048, 1024, 32, 4, 16384),
    "64 of 2048x1024 top 8": (2048, 1024, 64, 8, 8192),
    "128 of 4096x1408 top 8": (4096, 1408, 128, 8, 8192),
}


def routed() -> None:
    for name, (hidden, width, experts, chosen, tokens) in ROUTED.items():
        block = Experts(hidden, width, experts, chosen).cuda()
        x, g = normal(tokens, hidden).requires_grad_(), normal(tokens, hidden)

        def step() -> None:
            block(x).backward(g)

        for compiled in (False, True):
            if compiled:
                block.forward = torch.compile(block.forward)
            both = seconds(step, 0.5)
            with torch.no_grad():
                ahead = seconds(lambda: block(x), 0.3)
            print(
                "moe   " + json.dumps({"name": name, "compiled": compiled, "forward_ms": ahead * 1e3, "step_ms": both * 1e3}),
                flush=True,
            )


if __name__ == "__main__":
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    parts = {"products": products, "fp8": products_fp8, "passes": passes, "attention": attention, "blocks": blocks}
    parts |= {"grouped": grouped, "permutes": permutes, "routed": routed}
    for part in sys.argv[1:] or parts:
        try:
            parts[part]()
        except Exception as error:  # noqa: BLE001 (one part that this torch cannot do must not lose the others)
            print(f"{part}: {type(error).__name__}: {str(error)[:200]}", flush=True)

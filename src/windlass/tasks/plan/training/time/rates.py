"""FLOPs per token, MFU, HFU and tokens per second from the step time. Pure."""

from __future__ import annotations

from windlass.core.count import ForwardFlops, TrainingFlops, forward_flops, next_token_flops, training_flops
from windlass.core.hardware.spec import Device
from windlass.core.model import Frozen, ModelSpec
from windlass.core.recipe.sections import Compute, Recompute
from windlass.core.rule import Rule

SECONDS_PER_DAY = 86_400


def flops_per_token(
    spec: ModelSpec,
    rules: tuple[Rule, ...],
    sequence_tokens: int,
    *,
    recompute: Recompute = "none",
    causal: bool = True,
    next_token: bool = False,
) -> TrainingFlops:
    """6 (N_active - embedding) + 6 L heads head_dim s: causal attention counted once, as NVIDIA's tables and MFU do now.
    `causal=False` counts the masked half too, as the Megatron papers of 2021 and 2022 do (arXiv 2104.04473, appendix)."""
    seen = sequence_tokens / 2 if causal else float(sequence_tokens)
    forward = forward_flops(spec, rules, seen)
    if next_token:
        extra = next_token_flops(spec, rules, seen)
        forward = ForwardFlops(
            layers=forward.layers + extra.layers, attention=forward.attention + extra.attention, head=forward.head + extra.head
        )
    return training_flops(forward, recompute)


def adapter_flops(flops: TrainingFlops) -> TrainingFlops:
    """Frozen weights have no gradient of their own: a third of the model's FLOPs is not run."""
    saved = flops.model / 3
    return TrainingFlops(model=flops.model - saved, hardware=flops.hardware - saved)


class Rates(Frozen):
    tokens_per_second: float
    """Of all devices."""
    tokens_per_second_per_device: float
    model_flops_per_device: float
    """Per second: what MFU counts."""
    hardware_flops_per_device: float
    """Per second, recomputation included."""
    model_flops_utilization: float
    hardware_flops_utilization: float


def peak_flops(device: Device, compute: Compute) -> float:
    """MFU's denominator: the dense peak of the compute type (NVIDIA/dgxc-benchmarking README does the same)."""
    kind = "fp8" if compute == "fp8" else "bf16"
    return device.flops.get(kind) or device.flops["bf16"]


def rates_of(flops: TrainingFlops, tokens_per_step: int, step_seconds: float, num_devices: int, peak: float) -> Rates:
    tokens = tokens_per_step / step_seconds
    model, hardware = flops.model * tokens / num_devices, flops.hardware * tokens / num_devices
    return Rates(
        tokens_per_second=tokens,
        tokens_per_second_per_device=tokens / num_devices,
        model_flops_per_device=model,
        hardware_flops_per_device=hardware,
        model_flops_utilization=model / peak,
        hardware_flops_utilization=hardware / peak,
    )


def device_hours(total_flops: float, flops_per_device: float) -> float:
    """Device-hours for `total_flops` at a sustained rate."""
    return total_flops / flops_per_device / 3600

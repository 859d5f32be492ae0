"""The cost model against layers timed on an H200 (bench/kernels/training_kernels.py, torch 2.11, CUDA 13, 2026-11)."""

from __future__ import annotations

import pytest

from windlass.core.hardware.parse import parse_hardware
from windlass.core.layout import training_groups
from windlass.core.model import Activation, Alibi, Attention, Dense, Layer, ModelSpec, MoE, Norm, Router, Scoring
from windlass.tasks.plan.training.frameworks import efficiency
from windlass.tasks.plan.training.job import TrainingJob
from windlass.tasks.plan.training.time.layer import KernelSeconds, device_rates, kernels
from windlass.tasks.plan.training.work.feed_forward import feed_forward_operations
from windlass.tasks.plan.training.work.layers import layer_operations

pytestmark = pytest.mark.pure

BLOCKS = {
    # hidden, heads, KV heads, ffn, batch, length: milliseconds forward, forward and backward (torch.compile)
    "8B": ((4096, 32, 8, 14336, 1, 8192), (6.32, 20.39)),
    "70B tp4": ((8192, 16, 2, 7168, 1, 8192), (5.85, 18.61)),
    "405B tp8": ((16384, 16, 1, 6656, 1, 8192), (10.39, 32.53)),
    "1B": ((2048, 16, 8, 8192, 4, 4096), (3.83, 12.17)),
}
ROUTED = {
    # hidden, width, experts, chosen, tokens; that plain block sums gradients by index_add, which a trainer need not
    "32 top 4": ((2048, 1024, 32, 4, 16384), (2.14, 6.09)),
    "64 top 8": ((2048, 1024, 64, 8, 8192), (2.20, 6.69)),
    "128 top 8": ((4096, 1408, 128, 8, 8192), (5.55, 18.94)),
}
H200 = device_rates(parse_hardware("1xH200"), "bf16", efficiency("kernels", False))


def job(batch: int, length: int) -> TrainingJob:
    return TrainingJob(groups=training_groups(1), sequence_tokens=length, global_batch=batch, micro_batch=batch)


def milliseconds(made: KernelSeconds) -> tuple[float, float]:
    forward = made.forward_compute + made.forward_memory
    return 1e3 * forward, 1e3 * (forward + made.backward_compute + made.backward_memory)


@pytest.mark.parametrize("name", BLOCKS)
def test_dense_layers_within_6_percent(name: str) -> None:
    (hidden, heads, kv_heads, ffn, batch, length), (ahead, both) = BLOCKS[name]
    mixer = Attention(num_heads=heads, num_kv_heads=kv_heads, head_dim=128)
    layer = Layer(mixer=mixer, feed_forward=Dense(intermediate_size=ffn, gated=True, activation=Activation.SILU))
    spec = ModelSpec(
        name=name,
        family="llama",
        hidden_size=hidden,
        vocab_size=1000,
        context_tokens=length,
        layers=(layer,),
        norm=Norm(kind="rms", eps=1e-5),
        positions=Alibi(),  # the timed block rotates nothing
        tied_head=True,
    )
    one = job(batch, length)
    forward, step = milliseconds(kernels(layer_operations(spec, layer, one), one, H200))
    assert forward == pytest.approx(ahead, rel=0.06)
    assert step == pytest.approx(both, rel=0.02)


@pytest.mark.parametrize("name", ROUTED)
def test_routed_experts(name: str) -> None:
    (hidden, width, experts, chosen, tokens), (ahead, both) = ROUTED[name]
    router = Router(scoring=Scoring.SIGMOID)
    moe = MoE(num_experts=experts, num_active=chosen, intermediate_size=width, router=router, activation=Activation.SILU)
    one = job(1, tokens)
    forward, step = milliseconds(kernels(feed_forward_operations(moe, hidden, one), one, H200))
    assert forward == pytest.approx(ahead, rel=0.15)
    index_add = 1e3 * tokens * chosen * hidden * 4 / 500e9
    assert step + index_add == pytest.approx(both, rel=0.15)

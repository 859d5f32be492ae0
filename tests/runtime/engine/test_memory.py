from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from windlass.errors import BadInput, DoesNotFit
from windlass.model.families import describe, rules
from windlass.runtime.engine.memory import (
    CPU,
    GPU,
    block_bytes,
    cache_bytes,
    check_weights,
    limits_for,
    max_sequences,
    spare_bytes,
)
from windlass.runtime.nn.decoder import Decoder
from windlass.runtime.weights.load.random import RandomWeights

pytestmark = pytest.mark.cpu

TINY = Path(__file__).parents[2] / "model" / "families" / "tiny"


def spec_of(family: str) -> Any:
    return describe(json.loads((TINY / f"{family}.json").read_text()), family)


@pytest.mark.parametrize("family", ["llama", "glm4_moe_lite", "gpt_oss", "falcon-7b", "bloom"])
@pytest.mark.parametrize(("kv", "dtype"), [("bf16", torch.bfloat16), ("fp8", torch.float8_e4m3fn), ("fp32", torch.float32)])
def test_a_block_takes_what_the_decoder_makes(family: str, kv: str, dtype: torch.dtype) -> None:
    spec = spec_of(family)
    decoder = Decoder(spec, RandomWeights(spec, rules(spec), quant="bf16"))
    caches = decoder.make_caches(7, dtype)
    made = sum(part.nbytes for cache in caches for part in cache.parts)
    assert made == 7 * block_bytes(spec, kv)


def test_the_cache_takes_what_is_usual_or_what_there_is() -> None:
    spec = spec_of("llama")  # a context of 128
    per_block = block_bytes(spec, "bf16")
    assert cache_bytes(spec, "bf16", None, 4, 10**12, CPU) == 4 * 8 * per_block
    assert cache_bytes(spec, "bf16", 64, 4, 10**12, CPU) == 4 * 4 * per_block
    assert cache_bytes(spec, "bf16", None, 4, 1000, CPU) == 1000


def test_a_cpu_shares_its_memory_and_a_gpu_keeps_some_for_activations() -> None:
    assert spare_bytes(1000, CPU) == 500
    assert spare_bytes(80 * 2**30, GPU) == 72 * 2**30
    assert spare_bytes(4 * 2**30, GPU) == 4 * 2**30 - GPU.spared_bytes
    assert spare_bytes(2**30, GPU) == spare_bytes(-5, CPU) == 0


def test_as_many_run_at_once_as_have_room() -> None:
    spec = spec_of("llama")
    room = 8 * block_bytes(spec, "bf16")  # for a context of 128
    assert [max_sequences(spec, "bf16", None, room * n, GPU) for n in (0, 1, 200, 10**6)] == [1, 1, 200, 256]
    assert max_sequences(spec, "bf16", 64, room * 3, GPU) == 6
    assert max_sequences(spec, "bf16", None, room * 10**6, CPU) == 16


def limits(num_blocks: int, context: int | None = None, num_sequences: int = 4) -> Any:
    spec = spec_of("llama")
    return limits_for(
        spec,
        "bf16",
        num_blocks * block_bytes(spec, "bf16"),
        context=context,
        num_sequences=num_sequences,
        step_tokens=512,
        model_context=128,
    )


def test_the_context_is_what_fits_unless_it_was_asked_for() -> None:
    assert limits(100).longest_sequence == 128
    assert limits(8).longest_sequence == 128
    assert limits(100, context=64).longest_sequence == 64
    with pytest.raises(DoesNotFit, match="the KV cache of 128 tokens") as caught:
        limits(7)
    assert caught.value.short_bytes == block_bytes(spec_of("llama"), "bf16")
    with pytest.raises(DoesNotFit, match="the KV cache of 64 tokens"):
        limits(3, context=64)
    with pytest.raises(BadInput, match="--context 129 exceeds the 128 tokens of llama"):
        limits(100, context=129)


def test_many_sequences_widen_the_step() -> None:
    found = limits(100, num_sequences=600)
    assert found.max_step_tokens > 600
    assert found.max_step_logits >= 600


def test_weights_that_do_not_fit_are_refused_with_numbers() -> None:
    check_weights("m", 10, 10)
    with pytest.raises(DoesNotFit, match=r"the weights of m need 2\.00 GiB, and 1\.00 GiB are free: 1\.00 GiB short") as caught:
        check_weights("m", 2 * 2**30, 2**30)
    assert caught.value.short_bytes == 2**30


def test_the_plan_counts_the_rows_that_a_step_has() -> None:
    """Planning imports no engine, so it has a number of its own."""
    from windlass.runtime.engine.memory import STEP_TOKENS
    from windlass.tasks.plan.engines.profile import CPU_STEP_TOKENS

    assert STEP_TOKENS["cpu"] == CPU_STEP_TOKENS

"""vLLM's own numbers, as its server writes them, as ours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.request import Stats
from windlass.tasks.launch.vllm.metrics import read_stats

pytestmark = pytest.mark.pure

TEXT = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="500"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="500"} 1.0
vllm:prefix_cache_queries_total{engine="0",model_name="m {odd}"} 100.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 4.2e+01
vllm:num_preemptions_total{engine="0",model_name="m"} 5.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0
vllm:generation_tokens_total{engine="0",model_name="m"} 200.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 6.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 1.0
process_resident_memory_bytes 1e9
"""


def test_its_numbers_of_all_engines() -> None:
    assert read_stats(TEXT) == Stats(
        running=4, waiting=2, num_blocks=1000, blocks_used=500, prompt_tokens=1000, completion_tokens=200,
        prefix_query_tokens=100, prefix_hit_tokens=42, preemptions=5, finished=7,
    )  # fmt: skip


def test_without_the_number_of_blocks_a_share_is_still_a_share() -> None:
    found = read_stats("vllm:kv_cache_usage_perc 0.5\n")
    assert (found.blocks_used, found.num_blocks) == (500, 1000)


@given(
    st.text()
    | st.lists(st.sampled_from(["vllm:num_requests_running ", "NaN", "+Inf", "-1", "\n", "{", "}", "1e400"])).map("".join)
)
def test_whatever_it_says_there_are_numbers(text: str) -> None:
    found = read_stats(text)
    assert found.running >= 0 and found.blocks_used <= found.num_blocks

"""Metrics of a server: its requests, its engine, weights outside memory, the hosts and ranks of a split model."""

from __future__ import annotations

from windlass.core.metrics.metric import counter, gauge, histogram

# An objective for a latency must be one of these bounds, or the share below it cannot be counted.
FIRST_TOKEN_BUCKETS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960)

# --- requests

TIME_TO_FIRST_TOKEN = histogram(
    "windlass_time_to_first_token_seconds",
    "Time to first token, from arrival.",
    FIRST_TOKEN_BUCKETS,
    alias="vllm:time_to_first_token_seconds",
)
INTER_TOKEN_LATENCY = histogram(
    "windlass_inter_token_latency_seconds",
    "Time between output tokens of a sequence.",
    TOKEN_BUCKETS,
    alias="vllm:inter_token_latency_seconds",
)
QUEUE_TIME = histogram(
    "windlass_request_queue_time_seconds",
    "Time in the queue, before the first step.",
    REQUEST_BUCKETS,
    alias="vllm:request_queue_time_seconds",
)
REQUEST_LATENCY = histogram(
    "windlass_e2e_request_latency_seconds",
    "Time from arrival to the last token.",
    REQUEST_BUCKETS,
    alias="vllm:e2e_request_latency_seconds",
)
PROMPT_TOKENS = counter("windlass_prompt_tokens_total", "Prompt tokens processed.", alias="vllm:prompt_tokens_total")
CACHED_TOKENS = counter(
    "windlass_prompt_tokens_cached_total",
    "Prompt tokens served from the prefix cache.",
    alias="vllm:prompt_tokens_cached_total",
)
GENERATION_TOKENS = counter("windlass_generation_tokens_total", "Generated tokens.", alias="vllm:generation_tokens_total")
REQUESTS = counter(
    "windlass_requests_total",
    "Finished requests by outcome.",
    "outcome",
    alias="vllm:request_success_total",
    alias_labels=(("outcome", "finished_reason"),),
)
HTTP_REQUESTS = counter("windlass_http_requests_total", "HTTP requests by route and status.", "route", "status")
KEY_TOKENS = counter("windlass_key_tokens_total", "Tokens by API key and kind (prompt, completion).", "key", "kind")
KEY_REQUESTS = counter("windlass_key_requests_total", "Requests by API key.", "key")
REQUESTS_IN_FLIGHT = gauge("windlass_requests_in_flight", "Requests in flight (admitted and not finished).")
LOG_LINES_LOST = counter("windlass_log_lines_lost_total", "Log lines that could not be written.")

# --- the engine

ENGINE_UP = gauge("windlass_engine_up", "1 while the engine answers; 0 while it loads, restarts or has failed.")
ENGINE_RESTARTS = counter("windlass_engine_restarts_total", "Engine restarts.")
ENGINE_STEPS = counter("windlass_engine_steps_total", "Engine steps.")
RUNNING = gauge("windlass_num_requests_running", "Sequences running in the engine.", alias="vllm:num_requests_running")
WAITING = gauge("windlass_num_requests_waiting", "Sequences waiting in the engine's queue.", alias="vllm:num_requests_waiting")
KV_USAGE = gauge("windlass_kv_cache_usage_ratio", "Fraction of KV cache blocks in use.", alias="vllm:kv_cache_usage_perc")
KV_BLOCKS = gauge("windlass_kv_cache_blocks", "Total KV cache blocks.")
KV_CACHED = gauge("windlass_kv_cache_cached_blocks", "KV cache blocks that no sequence holds and that have a cached prefix.")
PREEMPTIONS = counter(
    "windlass_num_preemptions_total",
    "Sequences preempted for lack of KV cache blocks.",
    alias="vllm:num_preemptions_total",
)
PREFIX_QUERIES = counter(
    "windlass_prefix_cache_queries_total",
    "Prompt tokens looked up in the prefix cache.",
    alias="vllm:prefix_cache_queries_total",
)
PREFIX_HITS = counter(
    "windlass_prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", alias="vllm:prefix_cache_hits_total"
)

# --- several models in one server

MODEL_LOADED = gauge("windlass_model_loaded", "Whether the model is in memory.", "model")
MODEL_WAITING = gauge("windlass_model_requests_waiting", "Requests that wait for the model to load.", "model")
MODEL_LOADS = counter("windlass_model_loads_total", "How often the model was loaded.", "model")
MODEL_SWAPS = counter("windlass_model_swaps_total", "Models unloaded for another.")

# --- drafts

DRAFTED = counter("windlass_speculation_drafted_total", "Tokens drafted.", alias="vllm:spec_decode_num_draft_tokens_total")
ACCEPTED = counter(
    "windlass_speculation_accepted_total",
    "Drafted tokens that were accepted.",
    alias="vllm:spec_decode_num_accepted_tokens_total",
)

# --- weights outside the first tier

OFFLOAD_BYTES = gauge("windlass_offload_weights_bytes", "Weights by the tier they live in (device, host, disk).", "tier")
OFFLOAD_READ_BYTES = counter("windlass_offload_read_bytes_total", "Bytes of weights read from slower tiers.")
OFFLOAD_READ_SECONDS = counter("windlass_offload_read_seconds_total", "Time with at least one such read in flight.")
OFFLOAD_EXPERT_HITS = counter("windlass_offload_expert_hits_total", "Experts that a step needed and found in memory.")
OFFLOAD_EXPERT_MISSES = counter("windlass_offload_expert_misses_total", "Experts that had to be read.")
OFFLOAD_EXPERT_READS = counter(
    "windlass_offload_expert_disk_reads_total",
    "Beside a GPU: of these, experts that were read from disk; the others were in host memory.",
)
OFFLOAD_EXPERT_FORESEEN = counter(
    "windlass_offload_expert_foreseen_total", "Of these, experts whose read began before a layer had chosen them."
)
OFFLOAD_GUESSES = counter(
    "windlass_offload_guesses_total", "Experts that a layer was expected to choose, beside a GPU.", "outcome"
)
OFFLOAD_WASTED_BYTES = counter(
    "windlass_offload_wasted_bytes_total", "Bytes that a GPU fetched for experts that were not chosen."
)

# --- hosts and ranks of a split model, or of a training run

WORKER_UP = gauge("windlass_fleet_worker_up", "1 while the host is connected.", "worker")
WORKER_SHARE = gauge("windlass_fleet_worker_share_ratio", "Fraction of the model's weights that the host holds.", "worker")
RANK_STEPS = counter("windlass_rank_steps_total", "Steps of a rank.", "rank", "worker")
RANK_STEP_SECONDS = counter(
    "windlass_rank_step_seconds_total", "Time of a rank in steps, collectives included.", "rank", "worker"
)
RANK_COLLECTIVE_SECONDS = counter(
    "windlass_rank_collective_seconds_total",
    "Time of a rank in a collective: its own wait for the others, and the wire.",
    "rank",
    "worker",
    "collective",
    "group",
)
RANK_SENT_BYTES = counter("windlass_rank_sent_bytes_total", "Bytes that a rank sent in collectives.", "rank", "worker")
RANK_RECEIVED_BYTES = counter(
    "windlass_rank_received_bytes_total", "Bytes that a rank received in collectives.", "rank", "worker"
)

FLEET = (
    WORKER_UP,
    WORKER_SHARE,
    RANK_STEPS,
    RANK_STEP_SECONDS,
    RANK_COLLECTIVE_SECONDS,
    RANK_SENT_BYTES,
    RANK_RECEIVED_BYTES,
)

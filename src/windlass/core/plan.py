"""The Plan: everything decided before a run, frozen, as JSON. No `auto`, nothing left to decide later.

The keys are stable; other tools read them.
"""

from __future__ import annotations

from typing import Any

from windlass.core.constants import DECODE_ERRORS
from windlass.core.layout import Layout
from windlass.core.model import Frozen, ModelSpec
from windlass.core.place import Placement
from windlass.core.scheme import Scheme
from windlass.core.tiers.values import TierPlacement
from windlass.core.workload import Workload

PLAN_VERSION = 1


class ModelFacts(Frozen):
    name: str
    family: str
    parameters: int
    active_parameters: int
    checkpoint_parameters: int
    kv_bytes_per_token: int


class DeviceMemoryPlan(Frozen):
    """Memory use of one device. It fits if total <= capacity; memory that the engine leaves free is part of the overhead."""

    name: str
    weights_bytes: int
    kv_bytes: int
    activation_bytes: int
    overhead_bytes: int
    total_bytes: int
    capacity_bytes: int


class MemoryPlan(Frozen):
    per_device: tuple[DeviceMemoryPlan, ...]
    host_bytes: int = 0
    """Weights offloaded to host memory, over all nodes."""
    disk_bytes: int = 0
    """Weights offloaded to disk."""


class Speed(Frozen):
    decode_tokens_per_second: float
    """Predicted, over all sequences, at the workload's mean context."""
    decode_ceiling_tokens_per_second: float
    """The roofline: weight reads and FLOPs of a step with an empty KV cache and no losses. An upper bound for any engine."""
    prefill_tokens_per_second: float
    time_to_first_token_seconds: float
    bound_by: str
    sustained_tokens_per_second: float = 0.0
    """Output tokens per second with prefill included; the cost per token is based on it."""
    step_seconds: float = 0.0
    concurrency: int = 1
    decode_bytes_per_step: int = 0
    distinct_experts: float = 0.0
    breakdown: dict[str, float] = {}
    """Seconds of a decode step by cause."""
    decode_range: tuple[float, float] = (0.0, 0.0)
    """Eight of ten runs of this kind lie between these; the same for the others."""
    prefill_range: tuple[float, float] = (0.0, 0.0)
    sustained_range: tuple[float, float] = (0.0, 0.0)
    basis: str = ""
    """On what the intervals rest."""


class StepPart(Frozen):
    """One part of a decode step on the slowest device."""

    name: str
    seconds: float
    waits: str
    """What it waits for, or what waits for it."""
    num_bytes: int = 0
    flops: float = 0.0


class LoadPlan(Frozen):
    """A server under a steady stream of requests."""

    requests_per_second: float
    in_flight: float
    utilisation: float
    time_to_first_token_seconds: float
    time_per_token_seconds: float
    within: bool
    """Whether it keeps up, and within the limits that were given."""
    most_requests_per_second: float = 0.0
    """The highest rate that keeps them."""


class PoolPlan(Frozen):
    """Servers that do one half of the work: read prompts, or decode."""

    units: int
    """How many times the hardware that was named; 0: no number of them keeps the limits."""
    engine: str
    scheme: str
    layout: Layout
    most_requests_per_second: float
    """Of one unit, within the limits."""


class DisaggregatedPlan(Frozen):
    """Prompts and decoding on machines of their own (tasks/plan/inference/disaggregate.py)."""

    prefill: PoolPlan
    decode: PoolPlan
    requests_per_second: float
    kv_bytes: int
    """Of a prompt, that go from one pool to the other."""
    transfer_seconds: float
    link_bytes_per_second: float
    time_to_first_token_seconds: float
    """Wait, prompt, transfer and the first step."""
    time_per_token_seconds: float
    in_flight: float
    within: bool


class Cost(Frozen):
    usd_per_hour: float
    usd_per_million_output_tokens: float
    priced_at: str


class Energy(Frozen):
    watts: float
    kg_co2_per_million_output_tokens: float
    grid: str = ""


class Reason(Frozen):
    choice: str
    value: str
    why: str


class Alternative(Frozen):
    layout: Layout
    scheme: str
    engine: str
    decode_tokens_per_second: float
    prefill_tokens_per_second: float
    free_bytes: int
    why_not: str


class Rank(Frozen):
    rank: int
    node: int
    device: int
    tp: int
    pp: int
    dp: int


class KvBlocks(Frozen):
    block_tokens: int
    needed: int
    """Blocks needed per replica for the workload."""
    available: int
    """Blocks that fit on the fullest device."""


class Checkpoint(Frozen):
    source: str
    """Where the model was read from: a path, a registry name or a hub name."""
    digest: str
    """Digest of config and tensor index; a rank refuses files that differ. Empty if only a config was known."""
    bytes_as_published: int
    bytes_converted: int


class CloudOffer(Frozen):
    """A cloud offer that runs the model, with its price and further costs."""

    provider: str
    instance: str
    device: str
    num_devices: int
    num_instances: int
    spot: bool
    usd_per_hour: float
    priced_at: str
    stale: bool
    verified: bool
    source: str
    layout: str
    scheme: str
    decode_tokens_per_second: float
    usd_per_million_output_tokens: float
    storage_usd_per_month: float
    download_hours: float
    convert_hours: float
    break_even_hours: float | None
    """Rental hours that cost as much as buying the cards; None if the card price is unknown."""
    run_days: float | None = None
    """Of a training run; None for inference."""
    run_usd: float | None = None


class Plan(Frozen):
    model: ModelFacts
    fits: bool
    engine: str
    layout: Layout
    scheme: Scheme
    memory: MemoryPlan
    speed: Speed | None
    cost: Cost
    energy: Energy
    reasons: tuple[Reason, ...]
    alternatives: tuple[Alternative, ...]
    workload: Workload
    hardware: str
    placement: Placement | None = None
    shares: tuple[float, ...] = ()
    """Fraction of each tp index, if devices differ; empty: equal. Determines the placement."""
    kv_blocks: KvBlocks | None = None
    checkpoint: Checkpoint | None = None
    ranks: tuple[Rank, ...] = ()
    train: dict[str, Any] | None = None
    cloud: tuple[CloudOffer, ...] = ()
    short_bytes: int = 0
    """Missing bytes on the fullest device; 0 if it fits."""
    would_fit: tuple[str, ...] = ()
    """The smallest changes that would make it fit, mildest first."""
    step: tuple[StepPart, ...] = ()
    """With --explain."""
    load: LoadPlan | None = None
    disaggregated: DisaggregatedPlan | None = None
    """With --rate."""
    caution: str = ""
    """Why the plan is not to be relied on: a path of the engine that was never run. Empty: none."""
    spec: ModelSpec | None = None
    tiers: tuple[TierPlacement, ...] = ()
    """Where the weights of each rank of a replica live; empty: all fit on its device."""
    version: int = PLAN_VERSION


def encode_plan(plan: Plan) -> bytes:
    import msgspec

    return msgspec.json.encode(plan)


def load_plan(text: bytes) -> Plan:
    import msgspec

    from windlass.errors import BadInput

    try:
        plan = msgspec.json.decode(text, type=Plan)
    except DECODE_ERRORS as error:
        raise BadInput(f"not a plan of version {PLAN_VERSION}: {error}") from None
    if plan.version != PLAN_VERSION:
        raise BadInput(
            f"the plan has version {plan.version}; this Windlass reads version {PLAN_VERSION}: run `windlass plan` again"
        )
    return plan

"""The Plan: everything decided before a run, frozen, as JSON. No `auto`, nothing left to decide later.

A rank is handed the plan and its number and nothing else. The keys are stable; other tools read them.
"""

from __future__ import annotations

from typing import Any

from windlass.core.layout import Layout
from windlass.core.model import Frozen, ModelSpec
from windlass.core.place import Placement
from windlass.core.scheme import Scheme
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
    """What one device must hold. It fits when total <= capacity; what the engine must leave free is part of overhead."""

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
    """Weights kept in host memory, all nodes together."""
    disk_bytes: int = 0
    """Weights read from disk while running."""


class Speed(Frozen):
    decode_tokens_per_second: float
    """Predicted, all sequences together, at the workload's mean context."""
    decode_ceiling_tokens_per_second: float
    """The roofline: weights a step must read and operations it must do, an empty cache, nothing lost. No engine passes it."""
    prefill_tokens_per_second: float
    time_to_first_token_seconds: float
    bound_by: str
    sustained_tokens_per_second: float = 0.0
    """Output tokens when prompts have to be read too: what a month of such requests averages, and what a token costs by."""
    step_seconds: float = 0.0
    concurrency: int = 1
    decode_bytes_per_step: int = 0
    distinct_experts: float = 0.0
    breakdown: dict[str, float] = {}
    """Seconds of a decode step by cause."""


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
    """Per replica, for the workload."""
    available: int
    """What the free memory of the fullest device has room for."""


class Checkpoint(Frozen):
    source: str
    """Where the plan's model was read: a path, a registry name or a hub name."""
    digest: str
    """Of config and tensor index; a rank refuses files that differ. Empty where only a config was known."""
    bytes_as_published: int
    bytes_converted: int


class CloudOffer(Frozen):
    """What a provider asks for hardware that runs the model, with what else it costs."""

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
    """Hours of renting that cost as much as buying the cards; None where no card price is known."""
    run_days: float | None = None
    """Of a training run."""
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
    """How much each tp index takes, where devices are unlike; empty: alike. The placement is made of them."""
    kv_blocks: KvBlocks | None = None
    checkpoint: Checkpoint | None = None
    ranks: tuple[Rank, ...] = ()
    train: dict[str, Any] | None = None
    cloud: tuple[CloudOffer, ...] = ()
    short_bytes: int = 0
    """How much the fullest device lacks; 0 where it fits."""
    would_fit: tuple[str, ...] = ()
    """The smallest changes that would fit, cheapest first."""
    spec: ModelSpec | None = None
    version: int = PLAN_VERSION


def encode_plan(plan: Plan) -> bytes:
    import msgspec

    return msgspec.json.encode(plan)


def load_plan(text: bytes) -> Plan:
    import msgspec

    from windlass.errors import BadInput

    try:
        plan = msgspec.json.decode(text, type=Plan)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise BadInput(f"not a plan of version {PLAN_VERSION}: {error}") from None
    if plan.version != PLAN_VERSION:
        raise BadInput(f"the plan is of version {plan.version}; this Windlass reads version {PLAN_VERSION}: plan again")
    return plan

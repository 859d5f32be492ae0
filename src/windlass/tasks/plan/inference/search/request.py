"""What to plan: the request, its workload, and what is refused before anything is searched. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from windlass.core.hardware.measured import MeasuredRun
from windlass.core.hardware.spec import Hardware
from windlass.core.model import ModelSpec
from windlass.core.rule import Rule
from windlass.core.scheme import Scheme, scheme
from windlass.core.workload import GOALS, Workload, workload
from windlass.errors import BadInput, Impossible
from windlass.tasks.plan.inference.feasible import check_pins


@dataclass(frozen=True)
class LoadRequest:
    """A stream of requests, and the limits of their times."""

    rate: float
    first_seconds: float
    between_seconds: float


@dataclass(frozen=True)
class PlanRequest:
    """What to plan: model, hardware, workload, and what the user pinned."""

    spec: ModelSpec
    rules: tuple[Rule, ...]
    hardware: Hardware
    context_tokens: int
    concurrency: int | None = None
    """None: 1 for latency; as many as fit for throughput and cost."""
    goal: str = "latency"
    engine: str = "auto"
    quant: str = "auto"
    group: int = 128
    kv: str = "bf16"
    pins: dict[str, int] = field(default_factory=dict[str, int])
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    requests: int = 0
    """A burst of so many requests at once; 0: a steady stream."""
    spread: bool = False
    """Its answers differ in length, as those of a chat log do."""
    explain: bool = False
    load: LoadRequest | None = None
    measured: tuple[MeasuredRun, ...] = ()
    """Benchmark runs of this machine."""
    last_resort: bool = False
    """Nothing else can do it: a path of our engine that was never run is better than none, and is said to be one."""
    first_engine: bool = False
    """Try no other engine than the one that comes first."""
    waits: bool = True
    """Sequences that do not fit into memory at once may wait; otherwise all of them must fit at full length."""
    queue: bool = False
    """Let them wait: the search sets it where they do not all fit."""
    draft_tokens: int = 0
    acceptance: float = 0.0
    cached_prefix: float = 0.0
    region: str = "world"
    stored: Scheme | None = None
    """How the files on this disk are quantized, or those that would be downloaded; None: they are not, or only the published config is known."""
    stored_why: str = ""
    """Which files these are, if they are not the ones that were named."""


def request_workload(request: PlanRequest) -> Workload:
    made = workload(
        request.context_tokens,
        request.concurrency or 1,
        request.goal,
        prompt_tokens=request.prompt_tokens,
        new_tokens=request.new_tokens,
    )
    return msgspec.structs.replace(
        made,
        requests=request.requests,
        spread=request.spread,
        draft_tokens=request.draft_tokens,
        acceptance=request.acceptance,
        cached_prefix=request.cached_prefix,
    )


def check(request: PlanRequest) -> None:
    spec = request.spec
    if request.context_tokens > spec.context_tokens:
        raise Impossible(
            f"--context {request.context_tokens:,} exceeds the {spec.context_tokens:,} tokens of {spec.name}; "
            f"use --context {spec.context_tokens} or less"
        )
    if request.context_tokens < 1:
        raise BadInput("--context must be at least 1")
    if request.concurrency is not None and not 1 <= request.concurrency <= 10**6:
        raise BadInput("--concurrency must be from 1 to 1,000,000")
    if request.goal not in GOALS:
        raise BadInput(f"--goal must be one of {', '.join(GOALS)}, not {request.goal!r}")
    for name in ("prompt_tokens", "new_tokens"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise BadInput(f"--{name.replace('_', '-')} must be at least 1")
    if not 0 <= request.draft_tokens <= 16 or not 0 <= request.acceptance <= 1 or not 0 <= request.cached_prefix < 1:
        raise BadInput("--drafts is from 0 to 16, --acceptance from 0 to 1, --cached-prefix from 0 to less than 1")
    if not 0 <= request.requests <= 10**7:
        raise BadInput("--requests must be from 1 to 10,000,000")
    work = request_workload(request)
    if work.prompt_tokens + work.new_tokens > max(request.context_tokens, 2):
        raise BadInput(
            f"--prompt-tokens {work.prompt_tokens:,} plus --new-tokens {work.new_tokens:,} exceed --context {request.context_tokens:,}"
        )
    scheme("int4", request.group)  # refuses an invalid group size whatever the scheme
    check_pins(spec, request.hardware.num_devices, request.pins)

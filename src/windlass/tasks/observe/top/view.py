"""What `windlass top` knows at one time, read from servers, machines and runs. The structs are also its JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from windlass.core.metrics import node, serving, training
from windlass.core.metrics.exposition import Labels, read
from windlass.core.metrics.watched import AlertRow
from windlass.core.model import Frozen
from windlass.units import MIB


class GpuView(Frozen):
    index: str
    name: str
    use: float | None = None
    memory_bytes: float = 0.0
    memory_total_bytes: float = 0.0
    celsius: float | None = None
    watts: float | None = None
    limit_watts: float | None = None
    xid: int = 0


class NodeView(Frozen):
    name: str
    is_up: bool = True
    problem: str = ""
    cpu: float | None = None
    """Share of all cores in use, since the last reading."""
    memory_bytes: float = 0.0
    memory_total_bytes: float = 0.0
    disk_left: float | None = None
    """The fullest filesystem's free share."""
    received_per_second: float | None = None
    sent_per_second: float | None = None
    gpus: list[GpuView] = []


class RequestView(Frozen):
    number: int
    server: str
    age_seconds: float
    state: str
    prompt_tokens: int
    tokens: int
    tokens_per_second: float
    owner: str


class ServerView(Frozen):
    name: str
    is_up: bool = True
    problem: str = ""
    model: str = ""
    state: str = ""
    running: int = 0
    waiting: int = 0
    kv: float = 0.0
    prefix_hits: float = 0.0
    tokens_per_second: float = 0.0
    prompt_tokens_per_second: float = 0.0
    first_token_p50: float | None = None
    first_token_p95: float | None = None
    between_p50: float | None = None
    joules: float | None = None
    watts: float | None = None
    offload_bytes_per_second: float | None = None
    workers: list[tuple[str, str, float]] = []
    """Name, state, share of the weights."""


class TrainView(Frozen):
    name: str
    is_up: bool = True
    problem: str = ""
    step: int = 0
    steps: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    seconds_left: float | None = None
    checkpoint_age_seconds: float | None = None


class TopView(Frozen):
    at: float
    servers: list[ServerView] = []
    nodes: list[NodeView] = []
    runs: list[TrainView] = []
    requests: list[RequestView] = []
    alerts: list[AlertRow] = []


class Numbers:
    """Samples of one scrape, by name."""

    def __init__(self, text: str) -> None:
        self._found: dict[str, list[tuple[Labels, float]]] = {}
        for name, labels, value in read(text):
            self._found.setdefault(name, []).append((labels, value))

    def one(self, metric: object) -> float | None:
        """The sum over its series; None if there are none, or it is not a number."""
        values = [value for _, value in self._found.get(str(metric), ())]
        return sum(values) if values and not math.isnan(sum(values)) else None

    def by(self, metric: object, label: str) -> dict[str, float]:
        return {dict(labels).get(label, ""): value for labels, value in self._found.get(str(metric), ())}

    def label(self, metric: object, key: str, value: str, wanted: str) -> str:
        rows = (dict(labels) for labels, _ in self._found.get(str(metric), ()))
        return next((row.get(wanted, "") for row in rows if row.get(key) == value), "")


def node_view(name: str, now: Numbers, before: Numbers | None, seconds: float) -> NodeView:
    return NodeView(
        name=name,
        cpu=_cpu(now, before),
        memory_bytes=(now.one(node.MEMORY_TOTAL) or 0) - (now.one(node.MEMORY_AVAILABLE) or 0),
        memory_total_bytes=now.one(node.MEMORY_TOTAL) or 0,
        disk_left=_least_left(now),
        received_per_second=_rate(now, before, node.NETWORK_RECEIVED, seconds),
        sent_per_second=_rate(now, before, node.NETWORK_SENT, seconds),
        gpus=_gpus(now),
    )


def _rate(now: Numbers, before: Numbers | None, metric: object, seconds: float) -> float | None:
    new, old = now.one(metric), None if before is None else before.one(metric)
    return None if new is None or old is None or seconds <= 0 else max(new - old, 0.0) / seconds


def _cpu(now: Numbers, before: Numbers | None) -> float | None:
    if before is None:
        return None
    new, old = now.by(node.CPU_SECONDS, "mode"), before.by(node.CPU_SECONDS, "mode")
    total = sum(new.values()) - sum(old.values())
    idle = sum(new.get(mode, 0.0) - old.get(mode, 0.0) for mode in ("idle", "iowait"))
    return None if total <= 0 else 1 - idle / total


def _least_left(now: Numbers) -> float | None:
    free, size = now.by(node.FILESYSTEM_AVAIL, "mountpoint"), now.by(node.FILESYSTEM_SIZE, "mountpoint")
    return min((free[place] / size[place] for place in free if size.get(place)), default=None)


def _gpus(now: Numbers) -> list[GpuView]:
    used, free = now.by(node.FB_USED, "gpu"), now.by(node.FB_FREE, "gpu")
    use, heat, watts = now.by(node.GPU_UTIL, "gpu"), now.by(node.GPU_TEMP, "gpu"), now.by(node.POWER_USAGE, "gpu")
    limits, xids = now.by(node.GPU_POWER_LIMIT, "gpu"), now.by(node.XID_LAST, "gpu")
    return [
        GpuView(
            index=gpu,
            name=now.label(node.FB_USED, "gpu", gpu, "modelName"),
            use=use[gpu] / 100 if gpu in use else None,
            memory_bytes=used[gpu] * MIB,
            memory_total_bytes=(used[gpu] + free.get(gpu, 0.0)) * MIB,
            celsius=heat.get(gpu),
            watts=watts.get(gpu),
            limit_watts=limits.get(gpu),
            xid=int(xids.get(gpu, 0)),
        )
        for gpu in sorted(used, key=lambda index: (len(index), index))
    ]


def train_view(name: str, now: Numbers, at: float) -> TrainView:
    saved = now.one(training.LAST_CHECKPOINT)
    return TrainView(
        name=name,
        step=int(now.one(training.STEP) or 0),
        steps=int(now.one(training.PLANNED_STEPS) or 0),
        loss=now.one(training.LOSS),
        tokens_per_second=now.one(training.TOKEN_RATE),
        mfu=now.one(training.MFU),
        seconds_left=now.one(training.SECONDS_LEFT),
        checkpoint_age_seconds=None if saved is None else at - saved,
    )


def is_train(now: Numbers) -> bool:
    return now.one(training.STEPS) is not None


def is_server(now: Numbers) -> bool:
    return now.one(serving.ENGINE_UP) is not None


class _Now(msgspec.Struct):
    running: int = 0
    waiting: int = 0
    tokens_per_second: float = 0.0
    prompt_tokens_per_second: float = 0.0
    kv_used: float = 0.0
    prefix_hit_rate: float = 0.0
    ttft_p50: float | None = None
    ttft_p95: float | None = None
    itl_p50: float | None = None


class _Machine(msgspec.Struct):
    energy_joules: float | None = None


class _Worker(msgspec.Struct):
    name: str = ""
    state: str = ""
    share: float = 0.0


class StatusBody(msgspec.Struct):
    """What we read of /windlass/status."""

    model: str = ""
    state: str = ""
    now: _Now = msgspec.field(default_factory=_Now)
    machine: _Machine = msgspec.field(default_factory=_Machine)
    workers: list[_Worker] = []


def server_view(name: str, status: StatusBody, numbers: Mapping[str, float | None]) -> ServerView:
    """`numbers`: rates since the last reading: `watts`, `offload`."""
    now = status.now
    return ServerView(
        name=name,
        model=status.model,
        state=status.state,
        running=now.running,
        waiting=now.waiting,
        kv=now.kv_used,
        prefix_hits=now.prefix_hit_rate,
        tokens_per_second=now.tokens_per_second,
        prompt_tokens_per_second=now.prompt_tokens_per_second,
        first_token_p50=now.ttft_p50,
        first_token_p95=now.ttft_p95,
        between_p50=now.itl_p50,
        joules=status.machine.energy_joules,
        watts=numbers.get("watts"),
        offload_bytes_per_second=numbers.get("offload"),
        workers=[(one.name, one.state, one.share) for one in status.workers if len(status.workers) > 1],
    )

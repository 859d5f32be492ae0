"""Reads what `windlass top` shows: servers by their status and requests, machines and runs by their metrics. Remembers curves."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.core.metrics import serving
from windlass.core.metrics.watched import AlertRow, Watched
from windlass.core.model import Frozen
from windlass.tasks.observe.node.exporter import NodeExporter
from windlass.tasks.observe.scrape import Unreachable, fetch
from windlass.tasks.observe.top.view import (
    NodeView,
    Numbers,
    RequestView,
    ServerView,
    StatusBody,
    TopView,
    TrainView,
    is_server,
    is_train,
    node_view,
    server_view,
    train_view,
)
from windlass.wire.client.url import open_url

CURVE_POINTS = 120
HISTORY_SECONDS = 15.0
"""Between two readings of alerts, which a server evaluates as often."""


class _Row(msgspec.Struct):
    number: int
    age_seconds: float
    state: str
    prompt_tokens: int
    tokens: int
    tokens_per_second: float
    owner: str


class _Rows(msgspec.Struct):
    requests: list[_Row]


class Address(Frozen):
    url: str

    @property
    def name(self) -> str:
        return self.url.partition("://")[2]


class TopReader:
    """`exporter`: of this machine, read in this process; None: only what is at the addresses."""

    def __init__(
        self,
        addresses: list[Address],
        key: str = "",
        exporter: NodeExporter | None = None,
        get: Callable[[str, str], str] = fetch,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._addresses, self._key, self._exporter, self._get, self._clock = addresses, key, exporter, get, clock
        self._before: dict[str, tuple[float, Numbers]] = {}
        self._joules: dict[str, tuple[float, float]] = {}
        self._alerts: dict[str, tuple[float, list[AlertRow]]] = {}
        self.curves: dict[str, deque[float]] = {}
        """By name: `tokens HOST`, `loss HOST`, `watts HOST GPU`."""

    def read(self) -> TopView:
        at = self._clock()
        servers: list[ServerView] = []
        nodes: list[NodeView] = [self._this_machine(at)] if self._exporter is not None else []
        runs: list[TrainView] = []
        requests: list[RequestView] = []
        for address in self._addresses:
            try:
                numbers = Numbers(self._get(f"{address.url}/metrics", self._key))
            except Unreachable as error:
                nodes.append(NodeView(name=address.name, is_up=False, problem=str(error)))
                continue
            if is_server(numbers):
                servers.append(self._server(address, numbers, at))
                requests += self._requests(address)
            elif is_train(numbers):
                runs.append(train_view(address.name, numbers, at))
            else:
                nodes.append(self._node(address.name, numbers, at))
            self._before[address.name] = (at, numbers)
        alerts = [row for address in self._addresses for row in self._alerts.get(address.name, (0.0, []))[1]]
        view = TopView(at=at, servers=servers, nodes=nodes, runs=runs, requests=requests, alerts=alerts)
        self._remember(view)
        return view

    # --- one kind each

    def _this_machine(self, at: float) -> NodeView:
        assert self._exporter is not None
        self._exporter.sample()
        numbers = Numbers(self._exporter.text())
        found = self._node("this machine", numbers, at)
        self._before["this machine"] = (at, numbers)
        return found

    def _node(self, name: str, numbers: Numbers, at: float) -> NodeView:
        before = self._before.get(name)
        return node_view(name, numbers, before[1] if before else None, at - before[0] if before else 0.0)

    def _server(self, address: Address, numbers: Numbers, at: float) -> ServerView:
        try:
            status = msgspec.json.decode(self._get(f"{address.url}/windlass/status", self._key), type=StatusBody)
        except (Unreachable, *DECODE_ERRORS) as error:
            return ServerView(name=address.name, problem=f"no status: {error}")
        self._read_alerts(address, at)
        rates = {
            "watts": self._watts(address.name, status.machine.energy_joules, at),
            "offload": self._offload(address.name, numbers, at),
        }
        return server_view(address.name, status, rates)

    def _watts(self, name: str, joules: float | None, at: float) -> float | None:
        before = self._joules.get(name)
        if joules is not None:
            self._joules[name] = (at, joules)
        return None if joules is None or before is None or at <= before[0] else (joules - before[1]) / (at - before[0])

    def _offload(self, name: str, numbers: Numbers, at: float) -> float | None:
        before = self._before.get(name)
        new = numbers.one(serving.OFFLOAD_READ_BYTES)
        old = before[1].one(serving.OFFLOAD_READ_BYTES) if before else None
        return None if not new or old is None or before is None or at <= before[0] else (new - old) / (at - before[0])

    def _read_alerts(self, address: Address, at: float) -> None:
        if at - self._alerts.get(address.name, (0.0, []))[0] < HISTORY_SECONDS:
            return
        try:
            watched = msgspec.json.decode(self._get(f"{address.url}/windlass/history", self._key), type=Watched)
            self._alerts[address.name] = (at, [row for row in watched.alerts if row.state == "firing"])
        except (Unreachable, *DECODE_ERRORS):
            self._alerts[address.name] = (at, [])

    def _requests(self, address: Address) -> list[RequestView]:
        try:
            rows = msgspec.json.decode(self._get(f"{address.url}/windlass/requests", self._key), type=_Rows)
        except (Unreachable, *DECODE_ERRORS):
            return []
        return [RequestView(server=address.name, **msgspec.structs.asdict(row)) for row in rows.requests]

    def _remember(self, view: TopView) -> None:
        values = {f"tokens {server.name}": server.tokens_per_second for server in view.servers}
        values |= {f"loss {run.name}": run.loss for run in view.runs if run.loss is not None}
        values |= {f"cpu {node.name}": node.cpu for node in view.nodes if node.cpu is not None}
        values |= {
            f"watts {node.name} {gpu.index}": gpu.watts for node in view.nodes for gpu in node.gpus if gpu.watts is not None
        }
        for name, value in values.items():
            self.curves.setdefault(name, deque(maxlen=CURVE_POINTS)).append(value)

    # --- the one thing that changes something

    def cancel(self, server: str, number: int) -> str:
        """Empty if it was cancelled; otherwise why not."""
        address = next(one for one in self._addresses if one.name == server)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        request = urllib.request.Request(f"{address.url}/windlass/requests/{number}", headers=headers, method="DELETE")
        try:
            with open_url(request, 5.0):
                return ""
        except urllib.error.HTTPError as error:
            error.close()
            return "it has ended already" if error.code == 404 else f"the server refused (HTTP {error.code})"
        except OSError as error:
            return str(error)

"""Runs every load against every server, by turns, and reports."""

from __future__ import annotations

import asyncio
import resource
import shlex
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import msgspec

from windlass import __version__
from windlass.core.model import Frozen
from windlass.errors import BadInput
from windlass.runtime.machine.system import this_system
from windlass.tasks.bench.served.client.target import Target, TargetInfo
from windlass.tasks.bench.served.load import Load, fitted
from windlass.tasks.bench.served.own_server import OwnServer
from windlass.tasks.bench.served.record import LoadRun
from windlass.tasks.bench.served.report import ServedReport, TargetReport
from windlass.tasks.bench.served.summary import Limits, LoadResult, summarize

USUAL_WAITING = 64
"""Of `windlass serve`."""


class TargetSpec(Frozen):
    """A URL, or a model for a server of our own."""

    name: str
    url: str = ""
    serve: tuple[str, ...] = ()
    """Words behind `windlass serve`."""
    options: tuple[str, ...] = ()
    """Those of them that hold for all models; the name does not say them."""


def parse_target(text: str, options: Sequence[str] = ()) -> TargetSpec:
    """`http://host:8000`, `MODEL`, or `"MODEL --max-running 64"` with options of `windlass serve`; `options` come first."""
    if text.startswith(("http://", "https://")):
        return TargetSpec(name=text, url=text)
    try:
        words = [text] if text.strip() and Path(text).exists() else shlex.split(text)
    except ValueError as error:
        raise BadInput(f"{text!r} cannot be split into words: {error}") from None
    if not words or words[0].startswith("-"):
        raise BadInput(f"{text!r} is neither a URL nor a model, with or without options of `windlass serve`")
    return TargetSpec(name=text, serve=(words[0], *options, *words[1:]), options=tuple(options))


def served_words(spec: TargetSpec, loads: Sequence[Load]) -> tuple[str, ...]:
    """Nothing that changes how fast it is: a queue with room for all users, who wait instead of being refused, and no history of its own."""
    users = max(load.at_once for load in loads)
    given = {word.partition("=")[0] for word in spec.serve}
    queue = ("--max-waiting", str(users)) if users > USUAL_WAITING and "--max-waiting" not in given else ()
    return (*spec.serve, *queue, *(() if "--history" in given else ("--no-history",)))


class ServedSetup(Frozen):
    targets: tuple[TargetSpec, ...]
    loads: tuple[Load, ...]
    limits: Limits = Limits()
    rounds: int = 1
    seed: str = "0"
    api_key: str | None = None
    """For the URLs."""
    model: str | None = None
    """Its name at the URLs; None: the first that is listed."""
    may_shorten: bool = False
    """Whether prompts and answers may be shorter than the loads say, where a model's context is too short for them."""

    @property
    def is_exclusive(self) -> bool:
        """Several servers of our own would share the machine; so only one of them runs at a time."""
        return sum(1 for target in self.targets if not target.url) > 1


class Turn(Frozen):
    round: int
    load: int
    target: int


def turns(num_targets: int, num_loads: int, rounds: int, is_exclusive: bool) -> tuple[Turn, ...]:
    """Servers take turns load by load, or, where only one may run at a time, round by round. Every other round goes backwards,
    so that what changes steadily on the machine harms all alike."""
    found: list[Turn] = []
    for number in range(rounds):
        order = range(num_targets)[:: -1 if number % 2 else 1]
        if is_exclusive:
            found += [Turn(round=number, load=load, target=target) for target in order for load in range(num_loads)]
        else:
            found += [Turn(round=number, load=load, target=target) for load in range(num_loads) for target in order]
    return tuple(found)


class ServedProgress(Protocol):
    def starting(self, name: str) -> None: ...

    def ready(self, name: str, info: TargetInfo, seconds: float | None) -> None:
        """`seconds`: until our own server was ready; None: it ran already."""
        ...

    def shortened(self, loads: Sequence[Load], context_tokens: int) -> None:
        """The loads that are run instead, because the context is no longer than that."""
        ...

    def begin(self, name: str, load: Load) -> None: ...

    def done(self, requests: int) -> None: ...

    def ended(self, name: str, result: LoadResult) -> None:
        """Of this round alone."""
        ...


class _Host:
    """One target and, for a model, the server that is started for it."""

    def __init__(self, spec: TargetSpec, setup: ServedSetup, progress: ServedProgress) -> None:
        self.spec, self._setup, self._progress = spec, setup, progress
        self._server: OwnServer | None = None
        self._target: Target | None = None
        self.info: TargetInfo | None = None
        self.ready_seconds: list[float] = []
        self.runs: dict[int, list[LoadRun]] = {}

    async def target(self) -> Target:
        if self._target is None:
            self._target = await self._open()
        return self._target

    async def _open(self) -> Target:
        url, setup = self.spec.url, self._setup
        self._progress.starting(self.spec.name)
        if not url:
            self._server = OwnServer(served_words(self.spec, setup.loads))
            await self._server.start()
            url = self._server.url
            self.ready_seconds.append(self._server.ready_seconds)
        target = Target(url, setup.api_key, setup.model) if self.spec.url else Target(url)
        try:
            self.info = await target.open()
        except BaseException:
            await target.close()
            raise
        self._progress.ready(self.spec.name, self.info, self.ready_seconds[-1] if self.ready_seconds else None)
        return target

    async def close(self) -> None:
        target, self._target = self._target, None
        if target is not None:
            await target.close()
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.stop)

    def report(self, loads: Sequence[Load], limits: Limits) -> TargetReport:
        assert self.info is not None
        return TargetReport(
            name=self.spec.name,
            options=self.spec.options,
            model=self.info.model,
            owner=self.info.owner,
            context_tokens=self.info.context_tokens,
            asked=self.info.dialect.described,
            ready_seconds=tuple(self.ready_seconds),
            results=tuple(summarize(self.runs[load], limits) for load in range(len(loads))),
        )


async def bench_served(setup: ServedSetup, progress: ServedProgress) -> ServedReport:
    _allow_many_connections()
    hosts = [_Host(spec, setup, progress) for spec in setup.targets]
    try:
        opened = hosts[:1] if setup.is_exclusive else hosts
        for host in opened:  # what is wrong with any of them is found before an hour is measured
            await host.target()
        setup = _shortened(setup, opened, progress)
        for host in opened:
            await (await host.target()).check(setup.loads)
        for turn in turns(len(hosts), len(setup.loads), setup.rounds, setup.is_exclusive):
            host = hosts[turn.target]
            if setup.is_exclusive:
                await _close_others(hosts, host)
            await _take(turn, host, setup, progress)
    finally:
        for host in hosts:
            await host.close()
    return ServedReport(
        targets=tuple(host.report(setup.loads, setup.limits) for host in hosts),
        limits=setup.limits,
        rounds=setup.rounds,
        seed=setup.seed,
        machine=this_system().cpu_model,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        windlass=__version__,
    )


def _shortened(setup: ServedSetup, opened: Sequence[_Host], progress: ServedProgress) -> ServedSetup:
    known = [host.info.context_tokens for host in opened if host.info is not None and host.info.context_tokens]
    loads = fitted(setup.loads, min(known, default=0)) if setup.may_shorten else setup.loads
    if loads == setup.loads:
        return setup
    progress.shortened(loads, min(known))
    return msgspec.structs.replace(setup, loads=loads)


async def _take(turn: Turn, host: _Host, setup: ServedSetup, progress: ServedProgress) -> None:
    target, load = await host.target(), setup.loads[turn.load]
    await target.check([load])  # of a server that was not open before
    progress.begin(host.spec.name, load)
    run = await target.run(load, f"{setup.seed}/{turn.round}/{turn.load}", progress.done)
    host.runs.setdefault(turn.load, []).append(run)
    progress.ended(host.spec.name, summarize([run], setup.limits))


async def _close_others(hosts: Sequence[_Host], kept: _Host) -> None:
    for host in hosts:
        if host is not kept and not host.spec.url:
            await host.close()


def _allow_many_connections() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

"""A server watches itself: the last day, alerts, traces. Without Prometheus it is what the page and `windlass top` show."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from windlass.core.model import Frozen
from windlass.runtime.machine.folders import cache_dir

if TYPE_CHECKING:
    from windlass.tasks.observe.alerts.notify import Notifier
    from windlass.tasks.serve.service import Service


class WatchOptions(Frozen):
    instance: str
    """host:port of the server."""
    history: bool = True
    webhook: str = ""
    command: str = ""
    otlp: str = ""


def add_watch(service: Service, options: WatchOptions) -> None:
    if options.otlp:
        from windlass.tasks.serve.monitor.traces import TraceExporter

        service.traces = TraceExporter(options.otlp)
    if not options.history:
        return
    from windlass.model.formats.disk.atomic import write_atomically
    from windlass.tasks.observe.node.exporter import NodeExporter
    from windlass.tasks.observe.scrape import Source
    from windlass.tasks.observe.watch import Watch

    exporter = NodeExporter()

    def machine() -> str:
        exporter.sample()
        return exporter.text()

    sources = [
        Source(job="windlass-serve", instance=options.instance, read=lambda: service.last_metrics),
        Source(job="windlass-node", instance="this machine", read=machine),
    ]
    # Of a port and a model: what is served there next is not blamed for what came before.
    model = re.sub(r"[^\w.-]+", "-", service.model)
    file = cache_dir() / "history" / f"serve-{options.instance.rpartition(':')[2]}-{model}"
    service.watch = Watch(sources, file=file, write=write_atomically, notifiers=_notifiers(options))


def _notifiers(options: WatchOptions) -> list[Notifier]:
    from windlass.tasks.observe.alerts import notify

    found: list[Notifier] = [notify.webhook(options.webhook)] if options.webhook else []
    return [*found, notify.command(shlex.split(options.command))] if options.command else found

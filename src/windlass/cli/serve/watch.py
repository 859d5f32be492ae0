"""A server watches itself: the last day, alerts, traces. Without Prometheus it is what the page and `windlass top` show."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from windlass.machine.folders import cache_dir

if TYPE_CHECKING:
    from windlass.cli.serve.run import ServeOptions
    from windlass.observe.alerts.notify import Notifier
    from windlass.serve.service import Service


def add_watch(service: Service, options: ServeOptions, port: int) -> None:
    if options.otlp:
        from windlass.serve.monitor.traces import TraceExporter

        service.traces = TraceExporter(options.otlp)
    if not options.history:
        return
    from windlass.observe.node.exporter import NodeExporter
    from windlass.observe.scrape import Source
    from windlass.observe.watch import Watch

    exporter = NodeExporter()

    def machine() -> str:
        exporter.sample()
        return exporter.text()

    sources = [
        Source(job="windlass-serve", instance=f"{options.host}:{port}", read=lambda: service.last_metrics),
        Source(job="windlass-node", instance="this machine", read=machine),
    ]
    file = cache_dir() / "history" / f"serve-{port}"
    service.watch = Watch(sources, file=file, notifiers=_notifiers(options))


def _notifiers(options: ServeOptions) -> list[Notifier]:
    from windlass.observe.alerts import notify

    found: list[Notifier] = [notify.webhook(options.alert_webhook)] if options.alert_webhook else []
    return [*found, notify.command(shlex.split(options.alert_command))] if options.alert_command else found

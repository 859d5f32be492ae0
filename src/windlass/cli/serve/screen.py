"""What `windlass serve` shows: a panel when it is ready, and on a terminal one line of numbers below the log."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING

from windlass.core.constants import BLOCK_TOKENS
from windlass.units import format_bytes, format_context, format_seconds

if TYPE_CHECKING:
    from windlass.tasks.serve.service import Service

SECONDS = 1.0


def show_panel(service: Service, url: str) -> None:
    """On standard error; write errors are ignored."""
    from rich.console import Console
    from rich.panel import Panel

    service.log.end_status()
    with contextlib.suppress(OSError, ValueError):
        console = Console(stderr=True, highlight=False)
        console.print(Panel("\n".join(panel_lines(service, url)), title="windlass serve", title_align="left", expand=False))


def panel_lines(service: Service, url: str) -> list[str]:
    from rich.markup import escape

    from windlass.tasks.serve.api.status import describe_sampling
    from windlass.tasks.serve.http.origin import is_local

    settings, info = service.settings, service.supervisor.info
    assert info is not None
    described = [part for part in (info.scheme, f"on {info.device}" if info.device else "") if part]
    described += [f"{format_bytes(info.weights_bytes)} of weights"] if info.weights_bytes else []
    room = f"{format_context(info.context_tokens)} context, up to {info.max_sequences:,} running and {settings.max_waiting:,} queued requests"
    loaded = f"; ready in {format_seconds(info.load_seconds)}" if info.load_seconds else ""
    has_adapters = any(one.adapters for one in service.group)
    lines = [
        f"[bold]{url}/[/]  web page: chat and status" if service.has_page else "",
        f"[bold]{url}/v1[/]  OpenAI-compatible API",
        f"{escape(service.model)}: {escape(', '.join(described))}",
        f"{room}{loaded}",
        _cache_line(info.kv, service.stats.num_blocks),
        escape(f"on demand: {', '.join(one.model for one in service.group[1:])}") if service.models else "",
        escape(f"adapters: {', '.join(name for one in service.group for name in one.own_names[1:])}") if has_adapters else "",
        f"by default {describe_sampling(settings.sampling)}",
        escape(info.details.get("offload", "")),
        escape(f"planned: {service.plan.engine}, {service.plan.layout}, on {service.plan.hardware}") if service.plan else "",
        _key_line(len(service.keys), is_local(settings.host)),
        "Ctrl-C finishes running requests and exits; twice: exits at once",
    ]
    return [line for line in lines if line]


def _cache_line(kv: str, num_blocks: int) -> str:
    if not num_blocks:  # another engine's
        return ""
    kind = f" in {kv}" if kv else ""
    return f"{num_blocks * BLOCK_TOKENS:,} tokens of KV cache{kind}; prompts stay in it, the least recently used go first"


def _key_line(num_keys: int, local: bool) -> str:
    if num_keys:
        return f"{num_keys} API {'key' if num_keys == 1 else 'keys'}; send one as `Authorization: Bearer KEY`"
    if local:
        return "no API key: anyone on this machine can use it"
    return "[bold yellow]no API key, and reachable from other machines: anyone who can connect can use it; see --api-key[/]"


async def show_status(service: Service) -> None:
    """Until the server shuts down."""
    if not sys.stderr.isatty():
        return
    while not service.draining.is_set():
        service.log.show_status(status_line(service))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SECONDS):
                await service.draining.wait()
    service.log.end_status()


def status_line(service: Service) -> str:
    from windlass.tasks.serve.api.status import live_stats

    if service.state != "ready":
        done, total = service.loading
        share = f" {done / total:.0%} of {format_bytes(total)}" if total else ""
        return f"{service.state}{share}"
    found = live_stats(service.metrics, service.stats, 0)
    first = f", first token {format_seconds(found.ttft_p50)}" if found.ttft_p50 is not None else ""
    return f"{found.running} running, {found.waiting} waiting, {found.tokens_per_second:,.1f} tokens/s, KV {found.kv_used:.0%}{first}"

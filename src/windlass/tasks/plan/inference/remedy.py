"""What would fit, if the plan does not: the smallest changes, each tried before it is suggested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec

from windlass.core.hardware.spec import Hardware, Node
from windlass.errors import Impossible
from windlass.tasks.plan.inference.candidates import Candidate
from windlass.tasks.plan.inference.search.best import search_devices
from windlass.tasks.plan.inference.search.request import PlanRequest
from windlass.units import format_context

_FEWER_BITS = {"fp32": ("bf16", "fp8", "int8", "int4"), "bf16": ("fp8", "int8", "int4"), "fp8": ("int4",), "int8": ("int4",)}


def remedies(request: PlanRequest) -> tuple[str, ...]:
    """Changes that make it fit on the devices by themselves: at most one of each kind, mildest first."""
    found: list[str] = []
    request = replace(request, goal="latency")  # what fits does not depend on what is optimized
    for kind in (_fewer_bits, _smaller_cache, _shorter_context, _fewer_sequences, _other_engine, _more_devices):
        working = next((text for text, changed in kind(request) if fits_devices(changed)), None)
        if working:
            found.append(working)
    return tuple(found)


def fits_devices(request: PlanRequest) -> Candidate | None:
    """The best candidate without offloading; None if nothing fits."""
    try:
        found = search_devices(request)
    except Impossible:
        return None
    return found.best if found is not None and found.best.fits else None


def _fewer_bits(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    for name in _FEWER_BITS.get(request.quant, ()):
        yield f"--quant {name}", replace(request, quant=name)


def _smaller_cache(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    if request.kv != "fp8":
        yield "--kv fp8", replace(request, kv="fp8")


def _shorter_context(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    most = _largest(
        lambda blocks: replace(request, context_tokens=blocks * 512, prompt_tokens=None, new_tokens=None),
        request.context_tokens // 512,
    )
    if most:
        yield (
            f"--context {format_context(most * 512)}",
            replace(request, context_tokens=most * 512, prompt_tokens=None, new_tokens=None),
        )


def _fewer_sequences(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    most = _largest(lambda count: replace(request, concurrency=count), (request.concurrency or 1) - 1)
    if most:
        yield f"--concurrency {most}", replace(request, concurrency=most)


def _largest(changed: Callable[[int], PlanRequest], high: int) -> int:
    """The largest number up to `high` that fits, by bisection; 0 if not even 1 does."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        if fits_devices(changed(middle)):
            low = middle
        else:
            high = middle - 1
    return low


def _other_engine(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    """One that runs today and takes less memory, or splits otherwise."""
    if request.engine != "auto":
        yield "--engine auto", replace(request, engine="auto")


def _more_devices(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    """More of the same devices: first in the node (up to eight), then more nodes. Pinned degrees are dropped, since they were for the old count."""
    if not request.hardware.uniform:
        return
    node = request.hardware.nodes[0]
    device = node.devices[0]
    counts = (
        [count for count in (2, 3, 4, 6, 8) if count > len(node.devices)]
        if len(request.hardware.nodes) == 1 and device.kind != "cpu"
        else []
    )
    for count in counts:
        grown: Node = msgspec.structs.replace(node, devices=(device,) * count)
        yield (
            f"{count}x{device.name} instead of {len(node.devices)}",
            replace(request, hardware=_with_nodes(request.hardware, (grown,)), pins={}),
        )
    biggest: Node = msgspec.structs.replace(node, devices=(device,) * max([*counts, len(node.devices)]))
    for num_nodes in (2, 3, 4, 6, 8, 16, 32):
        if num_nodes > len(request.hardware.nodes):
            grown_nodes = _with_nodes(request.hardware, (biggest,) * num_nodes)
            yield (
                f"{num_nodes} nodes of {len(biggest.devices)}x{device.name}",
                replace(request, hardware=grown_nodes, pins={}),
            )


def _with_nodes(hardware: Hardware, nodes: tuple[Node, ...]) -> Hardware:
    bandwidth = hardware.network_bandwidth or (50e9 if nodes[0].devices[0].kind != "cpu" else 0.125e9)
    return Hardware(nodes=nodes, network_bandwidth=bandwidth if len(nodes) > 1 else 0.0, description=hardware.description)

"""What would fit, when nothing does: the smallest changes, each tried before it is offered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec

from windlass.core.hardware.spec import Hardware, Node
from windlass.errors import Impossible
from windlass.plan.inference.candidates import Candidate
from windlass.plan.inference.search import PlanRequest, search
from windlass.units import format_context

_FEWER_BITS = {"fp32": ("bf16", "fp8", "int8", "int4"), "bf16": ("fp8", "int8", "int4"), "fp8": ("int4",), "int8": ("int4",)}


def remedies(question: PlanRequest) -> tuple[str, ...]:
    """One of each kind of change that alone makes it fit the devices, gentlest first."""
    found: list[str] = []
    question = replace(question, goal="latency")  # what fits does not depend on what is optimized
    for kind in (_fewer_bits, _smaller_cache, _shorter_context, _fewer_sequences, _other_engine, _more_devices):
        working = next((text for text, changed in kind(question) if fits_devices(changed)), None)
        if working:
            found.append(working)
    return tuple(found)


def fits_devices(question: PlanRequest) -> Candidate | None:
    """The best candidate when everything stays on the devices."""
    try:
        best = search(question).best
    except Impossible:
        return None
    return best if best.fits and not best.fit.host_bytes and not best.fit.disk_bytes else None


def _fewer_bits(question: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    for name in _FEWER_BITS.get(question.quant, ()):
        yield f"--quant {name}", replace(question, quant=name)


def _smaller_cache(question: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    if question.kv != "fp8":
        yield "--kv fp8", replace(question, kv="fp8")


def _shorter_context(question: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    most = _largest(
        lambda blocks: replace(question, context_tokens=blocks * 512, prompt_tokens=None, new_tokens=None),
        question.context_tokens // 512,
    )
    if most:
        yield (
            f"--context {format_context(most * 512)}",
            replace(question, context_tokens=most * 512, prompt_tokens=None, new_tokens=None),
        )


def _fewer_sequences(question: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    most = _largest(lambda count: replace(question, concurrency=count), (question.concurrency or 1) - 1)
    if most:
        yield f"--concurrency {most}", replace(question, concurrency=most)


def _largest(changed: Callable[[int], PlanRequest], high: int) -> int:
    """The largest number up to `high` that fits, by bisection; 0 where not even one does."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        if fits_devices(changed(middle)):
            low = middle
        else:
            high = middle - 1
    return low


def _other_engine(question: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    if question.engine == "vllm":
        yield "--engine windlass", replace(question, engine="windlass")


def _more_devices(question: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    """More of the same: first in the node (up to eight), then more nodes. Pinned degrees are let go, since they counted the old devices."""
    if not question.hardware.uniform:
        return
    node = question.hardware.nodes[0]
    device = node.devices[0]
    counts = (
        [count for count in (2, 3, 4, 6, 8) if count > len(node.devices)]
        if len(question.hardware.nodes) == 1 and device.kind != "cpu"
        else []
    )
    for count in counts:
        grown: Node = msgspec.structs.replace(node, devices=(device,) * count)
        yield (
            f"{count}x{device.name} instead of {len(node.devices)}",
            replace(question, hardware=_with_nodes(question.hardware, (grown,)), pins={}),
        )
    biggest: Node = msgspec.structs.replace(node, devices=(device,) * max([*counts, len(node.devices)]))
    for num_nodes in (2, 3, 4, 6, 8, 16, 32):
        if num_nodes > len(question.hardware.nodes):
            grown_nodes = _with_nodes(question.hardware, (biggest,) * num_nodes)
            yield (
                f"{num_nodes} such nodes of {len(biggest.devices)}x{device.name}",
                replace(question, hardware=grown_nodes, pins={}),
            )


def _with_nodes(hardware: Hardware, nodes: tuple[Node, ...]) -> Hardware:
    bandwidth = hardware.network_bandwidth or (50e9 if nodes[0].devices[0].kind != "cpu" else 0.125e9)
    return Hardware(nodes=nodes, network_bandwidth=bandwidth if len(nodes) > 1 else 0.0, description=hardware.description)

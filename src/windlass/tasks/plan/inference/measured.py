"""Predictions put right by what was measured on this machine. Pure."""

from __future__ import annotations

from math import log

import msgspec

from windlass.core.hardware.measured import MeasuredLimits, MeasuredRun
from windlass.core.hardware.spec import Device, Hardware, Node
from windlass.core.plan import Reason, Speed
from windlass.tasks.plan.inference.candidates import Candidate, evaluate
from windlass.tasks.plan.inference.sites import Site
from windlass.tasks.plan.speed.serving import speed as speed_of

PLAUSIBLE = (0.2, 5.0)
"""A ratio outside says that something else was measured."""
SPREAD = 0.08
"""Of a run that is repeated: other load, clocks, thermals."""
FAR = log(4)
"""A run whose batch differs by more than four times says nothing of this one."""


def corrected(found: Candidate, site: Site, runs: tuple[MeasuredRun, ...]) -> tuple[Speed, list[Reason]]:
    """The speed, scaled by measured over predicted of the nearest run of the same model, engine and scheme."""
    speed, nearest = found.speed, _nearest(found, runs)
    if nearest is None:
        return speed, []
    then = _predicted(found, site, nearest)
    decode = nearest.decode_tokens_per_second / then.decode_tokens_per_second
    prefill = nearest.prefill_tokens_per_second / then.prefill_tokens_per_second
    if not all(PLAUSIBLE[0] < ratio < PLAUSIBLE[1] for ratio in (decode, prefill)):
        return speed, []
    why = f"{nearest.decode_tokens_per_second:,.4g} tokens/s at a batch of {nearest.batch} on {nearest.date}; predictions are scaled to it"
    return _scaled(speed, decode, prefill), [Reason(choice="measured here", value=f"{decode:.2f}x", why=why)]


def _nearest(found: Candidate, runs: tuple[MeasuredRun, ...]) -> MeasuredRun | None:
    key = (found.spec.name, found.engine.name, found.scheme.name)
    batch = max(found.workload.concurrency, 1)
    able = [run for run in runs if (run.model, run.engine, run.scheme) == key and abs(log(run.batch / batch)) <= FAR]
    return min(able, key=lambda run: abs(log(run.batch / batch)), default=None)


def _predicted(found: Candidate, site: Site, run: MeasuredRun) -> Speed:
    work = msgspec.structs.replace(
        found.workload,
        concurrency=run.batch,
        prompt_tokens=run.prompt_tokens,
        new_tokens=run.new_tokens,
        requests=0,
        draft_tokens=0,
    )
    again = evaluate(found.times.model.sizes, site, found.engine, found.scheme, found.layout, work)
    return speed_of(again.times)


def _scaled(speed: Speed, decode: float, prefill: float) -> Speed:
    value, prompt = speed.decode_tokens_per_second * decode, speed.prefill_tokens_per_second * prefill
    sustained = speed.sustained_tokens_per_second * decode
    return msgspec.structs.replace(
        speed,
        decode_tokens_per_second=round(value, 3),
        decode_ceiling_tokens_per_second=max(speed.decode_ceiling_tokens_per_second, round(value, 3)),
        prefill_tokens_per_second=round(prompt, 1),
        sustained_tokens_per_second=round(sustained, 3),
        step_seconds=speed.step_seconds / decode,
        time_to_first_token_seconds=speed.time_to_first_token_seconds / prefill,
        decode_range=_around(value),
        prefill_range=_around(prompt),
        sustained_range=_around(sustained),
        basis="measured on this machine",
    )


def _around(value: float) -> tuple[float, float]:
    return round(value * (1 - SPREAD), 3), round(value * (1 + SPREAD), 3)


def with_limits(hardware: Hardware, limits: MeasuredLimits) -> Hardware:
    """This machine with the figures that `windlass plan --calibrate` measured instead of the catalog's."""
    made = {id(node): _limited(node, limits) for node in hardware.distinct_nodes}
    return msgspec.structs.replace(hardware, nodes=tuple(made[id(node)] for node in hardware.nodes))


def _limited(node: Node, limits: MeasuredLimits) -> Node:
    known = {id(device): _limited_device(device, limits) for device in node.devices}
    return msgspec.structs.replace(
        node,
        devices=tuple(known[id(device)] for device in node.devices),
        ram_bandwidth=limits.host_read_bytes_per_second or node.ram_bandwidth,
        disk_bandwidth=limits.disk_bytes_per_second or node.disk_bandwidth,
    )


def _limited_device(device: Device, limits: MeasuredLimits) -> Device:
    flops = {name: limits.matmul_flops if name in ("bf16", "fp32") else value for name, value in device.measured_flops.items()}
    return msgspec.structs.replace(
        device,
        measured_bandwidth=limits.read_bytes_per_second or device.measured_bandwidth,
        measured_flops=flops if limits.matmul_flops else device.measured_flops,
        host_bandwidth=limits.link_bytes_per_second or device.host_bandwidth,
    )

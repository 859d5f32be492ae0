"""A decode step as a table of its parts: bytes, FLOPs, seconds, and what waits for what."""

from __future__ import annotations

from windlass.core.plan import StepPart
from windlass.tasks.plan.speed.roofline import SpeedModel

WAITS = {
    "dense": "reads and products overlap; the slower counts",
    "experts": "after the router; the slower of reads and products counts",
    "attention": "after the projections; the slower of cache reads and scores counts",
    "kernels": "between the others: launches, norms, routing",
    "front_end": "the device waits for the scheduler and the sampler",
    "network": "all ranks wait for the slowest",
    "exchange": "tokens go to their experts and back, as far as nothing hides it",
    "host_link": "beside the rest: streamed ahead of its use",
    "disk": "beside the rest: read ahead of its use",
    "expert_fetch": "after routing: nothing overlaps it",
    "host_compute": "the device waits for the CPU",
}


def step_parts(times: SpeedModel, batch: int, context: float) -> tuple[StepPart, ...]:
    """Of the slowest stage's slowest device; kernels timed one by one are not taken apart further."""
    _, _, worst = times.decode(batch, context)
    _, work, seconds = times.device_work(batch, context)
    flops = {"dense": work.dense_flops, "experts": work.expert_flops, "attention": work.score_flops}
    reads = {"dense": work.dense_bytes, "experts": work.expert_bytes, "attention": work.cache_bytes}
    made = [
        StepPart(name=name, num_bytes=round(reads[name]), flops=flops[name], seconds=max(pair), waits=WAITS[name])
        for name, pair in seconds.items()
        if max(pair)
    ]
    rest = {name: value for name, value in worst.parts.items() if name not in ("memory", "compute") and value}
    made += [StepPart(name=name.replace("_", " "), seconds=value, waits=WAITS[name]) for name, value in rest.items()]
    return tuple(made)

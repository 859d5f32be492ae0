"""The time of one step by cause, and which causes overlap."""

from __future__ import annotations

from dataclasses import dataclass, replace

PARTS = (
    "memory", "compute", "kernels", "front_end", "network", "exchange", "host_link", "disk", "expert_fetch", "host_compute",
)  # fmt: skip


@dataclass(frozen=True)
class StepTime:
    memory: float = 0.0
    compute: float = 0.0
    kernels: float = 0.0
    """Launches and small kernels."""
    front_end: float = 0.0
    """Scheduler, inputs and sampling."""
    network: float = 0.0
    exchange: float = 0.0
    """Tokens sent to their experts and back, as far as nothing hides it."""
    host_link: float = 0.0
    disk: float = 0.0
    expert_fetch: float = 0.0
    """Loading offloaded experts: they are known only after routing, so nothing overlaps it."""
    host_compute: float = 0.0
    """The CPU's part of a step beside a device: the device waits for it."""

    @property
    def total(self) -> float:
        """Work of one kind is bound by its reads or by its products, and counted as such; launches and network add to it; offloaded layers are
        streamed in parallel to all of it."""
        here = self.memory + self.compute + self.kernels + self.front_end + self.network + self.exchange
        return max(here, self.host_link, self.disk) + self.expert_fetch + self.host_compute

    @property
    def parts(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in PARTS}

    @property
    def bound_by(self) -> str:
        return max(self.parts.items(), key=lambda item: item[1])[0].replace("_", " ")


def beyond(floor: StepTime, seconds: float) -> StepTime:
    """Counts the time beyond the roofline as kernel overhead."""
    return replace(floor, kernels=max(seconds - floor.memory - floor.compute, 0.0))


def at_once(time: StepTime) -> StepTime:
    """If the device, its link, the disk and the CPU all worked side by side: for ceilings."""
    return replace(time, host_link=max(time.host_link, time.expert_fetch, time.host_compute), expert_fetch=0.0, host_compute=0.0)

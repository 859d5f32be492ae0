"""A server under a stream of requests: how many are in flight, how long they wait, and the most it takes within given limits. Pure."""

from __future__ import annotations

from math import inf

import msgspec

from windlass.core.plan import LoadPlan
from windlass.tasks.plan.speed.roofline import SpeedModel
from windlass.tasks.plan.speed.serving import pace

STEPS = 24
"""Of a bisection: far beyond what a prediction is worth."""


class ServedLoad:
    """Steady state of one replica by Little's law: requests in flight = rate x time in the system.

    Prompts take their share of the device's time, so tokens of others come later by 1 / (1 - share). Requests that find all places taken wait;
    how long follows the Pollaczek-Khinchine mean for exponential service, an assumption.
    """

    def __init__(self, times: SpeedModel, most: int) -> None:
        self.times, self.most = times, most
        self.work = times.model.workload
        self._steps: dict[int, float] = {}
        found = pace(times)
        self.prompt_seconds = self.work.prompt_tokens / found.prompt_rate
        self.first_seconds = found.first_seconds

    def step(self, batch: int) -> float:
        """Seconds between two tokens of a sequence."""
        if batch not in self._steps:
            rate, _, _ = self.times.decode(max(batch, 1), self.work.mean_decode_context)
            self._steps[batch] = max(batch, 1) / rate
        return self._steps[batch]

    def at(self, rate: float) -> LoadPlan:
        """`rate`: requests per second to one replica."""
        prompts = rate * self.prompt_seconds
        if prompts >= 1:
            return self._beyond(rate)
        wanted, between = self._in_flight(rate, prompts)
        if wanted > self.most:
            return self._beyond(rate)
        waiting = prompts / (1 - prompts) * self.prompt_seconds
        return LoadPlan(
            requests_per_second=rate,
            in_flight=round(wanted, 1),
            utilisation=round(max(prompts, wanted / self.most), 3),
            time_to_first_token_seconds=round(self.first_seconds + waiting, 4),
            time_per_token_seconds=round(between, 5),
            within=True,
        )

    def _in_flight(self, rate: float, prompts: float) -> tuple[float, float]:
        """(requests in flight, seconds between tokens): the more are in flight the slower they are, so it is a fixed point."""
        batch = 1
        for _ in range(STEPS):
            between = self.step(batch) / (1 - prompts)
            wanted = rate * (self.first_seconds + self.work.new_tokens * between)
            grown = max(round((batch + wanted) / 2), 1)
            if grown == batch or grown > 4 * self.most:
                return wanted, between
            batch = grown
        between = self.step(batch) / (1 - prompts)
        return float(batch), between

    def _beyond(self, rate: float) -> LoadPlan:
        """More than it serves: the queue grows without end."""
        return LoadPlan(
            requests_per_second=rate, in_flight=float(self.most), utilisation=1.0, time_to_first_token_seconds=inf,
            time_per_token_seconds=round(self.step(self.most), 5), within=False,
        )  # fmt: skip

    def decoding_at(self, rate: float) -> tuple[float, float]:
        """(requests in flight, seconds between tokens) of a server that only decodes: prompts are read elsewhere."""
        batch = 1
        for _ in range(STEPS):
            between = self.step(batch)
            wanted = rate * self.work.new_tokens * between
            grown = max(round((batch + wanted) / 2), 1)
            if grown == batch or grown > 4 * self.most:
                break
            batch = grown
        return rate * self.work.new_tokens * self.step(batch), self.step(batch)

    def most_decoding(self, between: float) -> float:
        """Highest rate of a server that only decodes, in `self.most` places and with at most `between` seconds from token to token."""
        low, high = 0, self.most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.step(middle) <= between else (low, middle - 1)
        return low / (self.work.new_tokens * self.step(low)) if low else 0.0

    def most_within(self, first: float, between: float) -> float:
        """The highest rate whose times stay within the limits; 0 if not even one request at a time does."""
        low, high = 0.0, 1 / self.prompt_seconds
        for _ in range(STEPS):
            middle = (low + high) / 2
            if within(self.at(middle), first, between):
                low = middle
            else:
                high = middle
        return low


def within(found: LoadPlan, first: float, between: float) -> bool:
    return found.within and found.time_to_first_token_seconds <= first and found.time_per_token_seconds <= between


def served_load(times: SpeedModel, most: int, rate: float, first: float = inf, between: float = inf) -> LoadPlan:
    """Of all replicas: each takes an equal part. With limits, also the highest rate that keeps them."""
    replicas = times.layout.dp
    one = ServedLoad(times, most)
    found, highest = one.at(rate / replicas), one.most_within(first, between) * replicas
    return msgspec.structs.replace(
        found,
        requests_per_second=rate,
        in_flight=found.in_flight * replicas,
        within=within(found, first, between),
        most_requests_per_second=round(highest, 3),
        time_to_first_token_seconds=min(found.time_to_first_token_seconds, 1e9),
    )

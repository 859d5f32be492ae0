"""In which order requests run when their models do not fit together. Pure.

Requests for the loaded model go first, whatever came before them, until somebody else has waited too long; then the model is loaded for
which most time has been waited. Each swap is shared by everybody who waits for that model. Before an idle model is replaced, its
successor's first request waits (`hold_seconds`): for as long as loading takes, because who pays for a swap only after having waited its
price never pays more than twice what hindsight would (Karlin et al., competitive snoopy caching, 1988); and for a share of the mean
time between requests, because nothing else makes requests share a swap when they are rare. With gaps of g and h seconds between the
requests of two models (Poisson), first come, first served swaps twice in g + h seconds, and with a wait of w twice in g + h + 2 w: a share
of 2 w / (g + h + 2 w) of the swaps is saved, whatever the rate. A wait of (g + h) / 2 saves half of them.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from statistics import median

from windlass.core.model import Frozen

SHARE_OF_GAPS = 0.5
MAX_REMEMBERED = 32
"""Arrivals of a model from which the mean time between them is estimated."""


class Waiting(Frozen):
    number: int
    model: str
    arrived: float


def next_request(
    queue: Sequence[Waiting], loaded: str | None, now: float, max_wait: float, linger: float = 0.0
) -> Waiting | None:
    """`max_wait`: after so many seconds a request no longer lets others of the loaded model pass. None: nobody yet, see `wait_until`."""
    if not queue or now < wait_until(queue, loaded, max_wait, linger):
        return None
    mine = [one for one in queue if one.model == loaded]
    late = [one for one in queue if one.model != loaded and now - one.arrived >= max_wait]
    if mine and not late:
        return min(mine, key=lambda one: (one.arrived, one.number))
    model = min(late, key=lambda one: one.arrived).model if late else _most_waited(queue, now)
    return min((one for one in queue if one.model == model), key=lambda one: (one.arrived, one.number))


def wait_until(queue: Sequence[Waiting], loaded: str | None, max_wait: float, linger: float) -> float:
    """When somebody of the queue may run: at once if it is for the loaded model, or if none is loaded."""
    if loaded is None or any(one.model == loaded for one in queue):
        return 0.0
    return min((one.arrived for one in queue), default=0.0) + min(linger, max_wait)


class Arrivals:
    """When the last requests of each model came."""

    def __init__(self) -> None:
        self._times: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MAX_REMEMBERED))

    def add(self, model: str, at: float) -> None:
        self._times[model].append(at)

    def gap_seconds(self, model: str) -> float | None:
        return mean_gap(tuple(self._times[model]))


def mean_gap(times: Sequence[float]) -> float | None:
    """By the median, which a night without requests does not change; of exponential gaps it is the mean times log 2."""
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return median(gaps) / math.log(2.0) if len(gaps) >= 3 else None


def hold_seconds(queue: Sequence[Waiting], loaded: str | None, arrivals: Arrivals, load_seconds: float, max_wait: float) -> float:
    """How long the first request for another model waits while the loaded one is idle. `load_seconds`: of a swap."""
    others = [one for one in queue if one.model != loaded]
    if loaded is None or not others:
        return 0.0
    first = min(others, key=lambda one: (one.arrived, one.number))
    gaps = [arrivals.gap_seconds(model) for model in (loaded, first.model)]
    share = SHARE_OF_GAPS * sum(gap for gap in gaps if gap is not None) if None not in gaps else 0.0
    return min(max(load_seconds, share), max_wait)


def _most_waited(queue: Sequence[Waiting], now: float) -> str:
    waited: dict[str, float] = {}
    for one in queue:
        waited[one.model] = waited.get(one.model, 0.0) + now - one.arrived + 1e-6
    return max(waited, key=lambda model: waited[model])


class Trace(Frozen):
    """What a simulated run came to."""

    num_swaps: int
    seconds: float
    mean_wait: float
    max_wait: float
    load_seconds: float
    """All swaps together."""


def simulate(
    arrivals: Sequence[Waiting],
    run_seconds: Mapping[str, float],
    load_seconds: Mapping[str, float],
    max_wait: float | None,
) -> Trace:
    """One request at a time. `max_wait` None: first come, first served."""
    queue, arrivals_so_far = list[Waiting](), Arrivals()
    mean_load = sum(load_seconds.values()) / len(load_seconds)
    coming = sorted(arrivals, key=lambda one: (one.arrived, one.number))
    now, loaded, swaps, loading, waits = 0.0, None, 0, 0.0, list[float]()
    while coming or queue:
        while coming and coming[0].arrived <= now:
            arrivals_so_far.add(coming[0].model, coming[0].arrived)
            queue.append(coming.pop(0))
        if not queue:
            now = coming[0].arrived
            continue
        linger = 0.0 if max_wait is None else hold_seconds(queue, loaded, arrivals_so_far, mean_load, max_wait)
        chosen = queue[0] if max_wait is None else next_request(queue, loaded, now, max_wait, linger)
        if chosen is None:
            ready = wait_until(queue, loaded, max_wait or 0.0, linger)
            now = max(now, min(ready, coming[0].arrived) if coming else ready)
            continue
        queue.remove(chosen)
        if chosen.model != loaded:
            swaps, loaded = swaps + 1, chosen.model
            loading += load_seconds[chosen.model]
            now += load_seconds[chosen.model]
        waits.append(now - chosen.arrived)
        now += run_seconds[chosen.model]
    return Trace(
        num_swaps=swaps,
        seconds=now,
        mean_wait=sum(waits) / max(len(waits), 1),
        max_wait=max(waits, default=0.0),
        load_seconds=loading,
    )

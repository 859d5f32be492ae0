"""In which order requests run when their models do not fit together. Pure.

Requests for the loaded model go first, whatever came before them, until somebody else has waited too long; then the model is loaded for
which most time has been waited. Each swap is shared by everybody who waits for that model. Before an idle model is replaced, its
successor's first request waits for as long as loading takes (`linger`): who pays for a swap only after having waited its price never
pays more than twice what hindsight would (Karlin et al., competitive snoopy caching, 1988).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from windlass.core.model import Frozen


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
    linger: float = 0.0,
) -> Trace:
    """One request at a time. `max_wait` None: first come, first served."""
    queue: list[Waiting] = []
    coming = sorted(arrivals, key=lambda one: (one.arrived, one.number))
    now, loaded, swaps, loading, waits = 0.0, None, 0, 0.0, list[float]()
    while coming or queue:
        while coming and coming[0].arrived <= now:
            queue.append(coming.pop(0))
        if not queue:
            now = coming[0].arrived
            continue
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

"""In which order requests run when their models do not fit together. Pure.

Requests for the loaded model go first, whatever came before them, until somebody else has waited too long; then the model is loaded for
which most time has been waited. Each swap is shared by everybody who waits for that model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from windlass.core.model import Frozen


class Waiting(Frozen):
    number: int
    model: str
    arrived: float


def next_request(queue: Sequence[Waiting], loaded: str | None, now: float, max_wait: float) -> Waiting | None:
    """`max_wait`: after so many seconds a request no longer lets others of the loaded model pass."""
    if not queue:
        return None
    mine = [one for one in queue if one.model == loaded]
    late = [one for one in queue if one.model != loaded and now - one.arrived >= max_wait]
    if mine and not late:
        return min(mine, key=lambda one: (one.arrived, one.number))
    model = min(late, key=lambda one: one.arrived).model if late else _most_waited(queue, now)
    return min((one for one in queue if one.model == model), key=lambda one: (one.arrived, one.number))


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
    queue: list[Waiting] = []
    coming = sorted(arrivals, key=lambda one: (one.arrived, one.number))
    now, loaded, swaps, loading, waits = 0.0, None, 0, 0.0, list[float]()
    while coming or queue:
        while coming and coming[0].arrived <= now:
            queue.append(coming.pop(0))
        if not queue:
            now = coming[0].arrived
            continue
        chosen = queue[0] if max_wait is None else next_request(queue, loaded, now, max_wait)
        assert chosen is not None
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

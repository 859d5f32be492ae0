"""A conversion that follows its source as it arrives: outputs in the order of the files, each file given up when it is done."""

from __future__ import annotations

from windlass.convert.outputs import Output
from windlass.convert.readers import Place, claimed
from windlass.convert.run import Job
from windlass.convert.streamed import MOST_OPEN, StreamedStore
from windlass.convert.units import Unit
from windlass.errors import Impossible


def in_order_of_arrival(planned: tuple[Output, ...], places: dict[str, Place], stream: StreamedStore) -> tuple[Output, ...]:
    needs = {output.name: stream.files_of(claimed(places[output.name])) for output in planned}
    for output in planned:
        files = needs[output.name]
        if files[-1] - files[0] >= MOST_OPEN:
            raise Impossible(f"{output.name} lies in files that are far apart; download the model whole, without --stream")
    return tuple(sorted(planned, key=lambda output: needs[output.name][-1]))


def follow(job: Job, places: dict[str, Place], stream: StreamedStore) -> None:
    """Starts the stream without files that an earlier run has finished, and lets go of each as its slices are safe."""
    files_of = [stream.files_of(claimed(places[output.name])) for output in job.outputs]
    left: dict[int, int] = {}
    last: dict[int, str] = {}
    for unit in job.units:
        for file in files_of[unit.output]:
            left[file] = left.get(file, 0) + 1
            last[file] = unit.key

    def settled(units: list[Unit]) -> None:
        for unit in units:
            for file in files_of[unit.output]:
                left[file] -= 1
                if left[file] == 0:
                    stream.release(file)

    remaining = {file for unit in job.units if not job.journal.done(unit.key) for file in files_of[unit.output]}
    job.flush_after = frozenset(last.values())
    job.settled = settled
    stream.begin(done=set(left) - remaining)

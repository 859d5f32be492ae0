"""A conversion that follows its source as it arrives: slices in the order of the files, each file given up when it is done."""

from __future__ import annotations

from windlass.convert.outputs import ConvertedTensor
from windlass.convert.run import ConversionJob
from windlass.convert.slices import RowSlice
from windlass.convert.streamed import MOST_OPEN, StreamedStore
from windlass.errors import Impossible
from windlass.weights.tensors.readers import TensorLocation, stored_names


def order_by_arrival(
    units: tuple[RowSlice, ...], outputs: tuple[ConvertedTensor, ...], locations: dict[str, TensorLocation], stream: StreamedStore
) -> tuple[RowSlice, ...]:
    """Only the work is ordered; where things lie in the new files does not depend on how the source came."""
    needs = [stream.files_of(stored_names(locations[output.name])) for output in outputs]
    for output, files in zip(outputs, needs, strict=True):
        if files[-1] - files[0] >= MOST_OPEN:
            raise Impossible(f"{output.name} lies in files that are far apart; download the model whole, without --stream")
    return tuple(sorted(units, key=lambda unit: needs[unit.output][-1]))


def attach_stream(job: ConversionJob, locations: dict[str, TensorLocation], stream: StreamedStore) -> None:
    """Has the stream bring the files that are still needed, and lets go of each as its slices are safe."""
    files_of = [stream.files_of(stored_names(locations[output.name])) for output in job.outputs]
    left: dict[int, int] = {}
    for unit in job.units:
        for file in files_of[unit.output]:
            left[file] = left.get(file, 0) + 1

    def starting(units: list[RowSlice]) -> None:
        last = {file: unit.key for unit in units for file in files_of[unit.output]}
        job.flush_after = frozenset(last.values())
        stream.begin(last.keys())

    def settled(units: list[RowSlice]) -> None:
        for unit in units:
            for file in files_of[unit.output]:
                left[file] -= 1
                if left[file] == 0:
                    stream.release(file)

    job.starting, job.settled, job.given_up = starting, settled, stream.close

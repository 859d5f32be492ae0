"""Converting while the source downloads: slices in the order of its files, each file deleted when its slices are done."""

from __future__ import annotations

from windlass.errors import Impossible
from windlass.runtime.weights.tensors.readers import TensorLocation, stored_names
from windlass.tasks.convert.outputs import ConvertedTensor
from windlass.tasks.convert.run import ConversionJob
from windlass.tasks.convert.slices import RowSlice
from windlass.tasks.convert.streamed import MOST_OPEN, StreamedStore


def order_by_arrival(
    units: tuple[RowSlice, ...], outputs: tuple[ConvertedTensor, ...], locations: dict[str, TensorLocation], stream: StreamedStore
) -> tuple[RowSlice, ...]:
    """Reorders the work only; the layout of the output does not depend on it."""
    needs = [stream.files_of(stored_names(locations[output.name])) for output in outputs]
    for output, files in zip(outputs, needs, strict=True):
        if files[-1] - files[0] >= MOST_OPEN:
            raise Impossible(
                f"{output.name} is spread over source files that are far apart; download the model first, without --stream"
            )
    return tuple(sorted(units, key=lambda unit: needs[unit.output][-1]))


def attach_stream(job: ConversionJob, locations: dict[str, TensorLocation], stream: StreamedStore) -> None:
    """Makes the job start the downloads it needs and delete each source file once its slices are on disk."""
    files_of = [stream.files_of(stored_names(locations[output.name])) for output in job.outputs]
    left: dict[int, int] = {}
    for unit in job.units:
        for file in files_of[unit.output]:
            left[file] = left.get(file, 0) + 1

    def on_start(units: list[RowSlice]) -> None:
        last = {file: unit.key for unit in units for file in files_of[unit.output]}
        job.flush_after = frozenset(last.values())
        stream.begin(last.keys())

    def on_synced(units: list[RowSlice]) -> None:
        for unit in units:
            for file in files_of[unit.output]:
                left[file] -= 1
                if left[file] == 0:
                    stream.release(file)

    job.on_start, job.on_synced, job.on_abort = on_start, on_synced, stream.close

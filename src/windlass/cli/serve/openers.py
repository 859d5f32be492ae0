"""Opens the engine of a served model: ours in a process of its own, or vLLM."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from windlass.cli.serve.options import ServeOptions
from windlass.errors import BadInput

if TYPE_CHECKING:
    from windlass.core.client import Client
    from windlass.core.plan import Plan
    from windlass.core.request import Sampling

Opener = Callable[[Callable[[int, int], None], Callable[[str], None]], "Client"]
"""(progress in bytes, lines for the operator) -> a client that loads with the first request."""


def sampling_of(path: Path) -> Sampling:
    """Defaults of requests that set nothing: the model's own, else those of `windlass run`."""
    from windlass.core.request import Sampling
    from windlass.open.generation import default_sampling

    return Sampling(**default_sampling(path))


def _plan(file: Path | None) -> Plan | None:
    if file is None:
        return None
    from windlass.open.plan import read_plan

    return read_plan(file)


def local(options: ServeOptions, path: Path, adapters: tuple[tuple[str, str], ...] = ()) -> tuple[Opener, Plan | None]:
    """The embedded engine, in a process of its own."""
    from windlass.open.client import open_client, require_torch
    from windlass.open.compile import compile_kernels
    from windlass.open.plan import apply_plan
    from windlass.runtime.weights.text.trial import try_text

    require_torch("running a model")
    try_text(path)
    plan = _plan(options.plan)
    launch = msgspec.structs.replace(options.launch, model=str(path), adapters=adapters)
    launch = launch if plan is None else apply_plan(launch, plan)
    launch = msgspec.structs.replace(launch, max_sequences=options.max_running or launch.max_sequences)
    compile_kernels(shown=True, device=launch.device)
    return lambda progress, notify: open_client(launch, progress, notify=notify), plan


def vllm(options: ServeOptions, path: Path) -> tuple[Opener, Plan]:
    launch = options.launch
    if launch.kv is not None or launch.exact or launch.device != "auto":
        raise BadInput("--kv, --exact and --device are for --engine windlass; put them in the plan instead")
    if launch.deterministic and os.environ.get("VLLM_BATCH_INVARIANT") != "1":
        raise BadInput(
            "--deterministic is promised by --engine windlass; vLLM has a mode of its own for some GPUs (beta): set VLLM_BATCH_INVARIANT=1 to use it"
        )
    if launch.speculate != "off":
        raise BadInput("--speculate is for --engine windlass; leave it out")
    from windlass.open.vllm.client import VllmClient, planned

    model, plan, make_command = planned(path, _plan(options.plan), launch.context_tokens, options.max_running, options.name)
    return lambda _progress, _notify: VllmClient(make_command, model.name, plan), plan

"""`--engine vllm`: from a model directory and a plan to the command that starts vLLM."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from pathlib import Path

from windlass.core.plan import Plan
from windlass.errors import Error, Impossible
from windlass.tasks.launch.command import Command, ServedModel, VllmOptions
from windlass.tasks.launch.vllm.render import find_python, free_port, render

CONTEXT = 8192
CONCURRENCY = (64, 16, 4, 1)
"""Tried in turn by default."""


class VllmNotInstalled(Error):
    def __init__(self) -> None:
        super().__init__("vLLM is not installed; run `windlass setup vllm` (with --cpu if there is no GPU)")


def served_model(path: Path, name: str = "") -> ServedModel:
    """What vLLM must know of the files. Only directories: vLLM reads no .m files, and .gguf only with a plug-in."""
    if not path.is_dir():
        raise Impossible(f"vLLM serves model directories, and {path} is a file; use --engine windlass")
    from windlass.model.formats.config import read_config
    from windlass.open.scheme import stored_scheme
    from windlass.runtime.weights.text.files import model_text

    stored, _ = stored_scheme(read_config(path))
    template = model_text(path).chat_template if (path / "tokenizer.json").is_file() else None
    where = path.resolve()
    return ServedModel(path=str(where), name=name or where.name, stored=stored, chat_template=template)


def plan_vllm(path: Path, *, context: int | None, concurrency: int | None, quant: str = "", kv: str = "bf16") -> Plan:
    """For this machine. `quant`: by default as stored; `fp32`: plain floats computed in fp32.

    `context` None: the model's, at most 8k. `concurrency` None: the largest of a few that fits.
    """
    from windlass.open.hardware import resolve_hardware
    from windlass.open.resolve import describe_path
    from windlass.tasks.plan.inference.assemble import make_plan
    from windlass.tasks.plan.inference.search.request import PlanRequest

    resolved = describe_path(path)
    question = PlanRequest(
        spec=resolved.spec,
        rules=resolved.rules,
        hardware=resolve_hardware(None),
        context_tokens=context or min(CONTEXT, resolved.spec.context_tokens),
        engine="vllm",
        quant=quant or served_model(path).stored,
        kv=kv,
        waits=False,
    )
    *tried, last = (concurrency,) if concurrency is not None else CONCURRENCY
    for count in tried:
        made = make_plan(replace(question, concurrency=count), source=resolved.source, digest=resolved.digest)
        if made.fits and not made.memory.host_bytes and not made.memory.disk_bytes:
            return made
    return make_plan(replace(question, concurrency=last), source=resolved.source, digest=resolved.digest)


MASTER = "WINDLASS_VLLM_MASTER"
"""HOST:PORT of the first node, set by `windlass launch` for a plan over several."""


def vllm_command(plan: Plan, model: ServedModel, *, node: int = 0, extra: tuple[str, ...] = ()) -> Command:
    """For this machine: on a free port, with a random API key. `node`: its number in the plan."""
    address, _, master_port = os.environ.get(MASTER, "").rpartition(":")
    python = find_python()
    if python is None:
        raise VllmNotInstalled
    options = VllmOptions(
        python=python,
        port=free_port(),
        api_key=secrets.token_urlsafe(32),
        master_address=address,
        master_port=int(master_port) if address else VllmOptions().master_port,
        device_bytes=_device_bytes(),
        visible=tuple(name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()),
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        extra=extra,
    )
    return render(plan, model, options, node)


def _device_bytes() -> int:
    """Memory of the smallest GPU; 0: none."""
    from windlass.runtime.machine.probe import probe

    return min((device.memory_bytes for device in probe(measure=False).devices if device.kind == "cuda"), default=0)

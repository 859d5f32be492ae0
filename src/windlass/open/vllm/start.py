"""`--engine vllm`: from a model directory and a plan to the command that starts vLLM."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace
from pathlib import Path

from windlass.core.plan import Plan
from windlass.errors import Error, Impossible
from windlass.launch.command import Command, Options, ServedModel
from windlass.launch.vllm.render import find_python, free_port, render

CONTEXT = 8192
CONCURRENCY = (64, 16, 4, 1)
"""Tried in turn where nobody says."""


class NotInstalled(Error):
    def __init__(self) -> None:
        super().__init__("vLLM is not installed: `windlass setup vllm` makes an environment for it (--cpu without a GPU)")


def served_model(path: Path, name: str = "") -> ServedModel:
    """What a server must know of the files. Only directories: vLLM reads no .m file, and a .gguf only with a plug-in."""
    if not path.is_dir():
        raise Impossible(f"vLLM serves model directories; {path} is a file, which --engine windlass runs")
    from windlass.formats.config import read_config
    from windlass.open.scheme import stored_scheme
    from windlass.weights.text.files import model_text

    stored, _ = stored_scheme(read_config(path))
    template = model_text(path).chat_template if (path / "tokenizer.json").is_file() else None
    where = path.resolve()
    return ServedModel(path=str(where), name=name or where.name, stored=stored, chat_template=template)


def plan_vllm(path: Path, *, context: int | None, concurrency: int | None, quant: str = "", kv: str = "bf16") -> Plan:
    """For this machine. Weights as they are stored, unless said otherwise (`fp32`: plain floats computed in fp32).

    `context` None: the model's own, 8k at most. `concurrency` None: the most of a few that fit.
    """
    from windlass.open.hardware import resolve_hardware
    from windlass.open.resolve import describe_path
    from windlass.plan.inference.assemble import make_plan
    from windlass.plan.inference.search import PlanRequest

    resolved = describe_path(path)
    asked = PlanRequest(
        spec=resolved.spec,
        rules=resolved.rules,
        hardware=resolve_hardware(None),
        context_tokens=context or min(CONTEXT, resolved.spec.context_tokens),
        engine="vllm",
        quant=quant or served_model(path).stored,
        kv=kv,
    )
    *tried, last = (concurrency,) if concurrency is not None else CONCURRENCY
    for count in tried:
        made = make_plan(replace(asked, concurrency=count), source=resolved.source, digest=resolved.digest)
        if made.fits and not made.memory.host_bytes and not made.memory.disk_bytes:
            return made
    return make_plan(replace(asked, concurrency=last), source=resolved.source, digest=resolved.digest)


def vllm_command(
    plan: Plan, model: ServedModel, *, node: int = 0, master_address: str = "", extra: tuple[str, ...] = ()
) -> Command:
    """For this machine: on a port that nobody uses, with a key that nobody else knows. `node`: which of the plan's it is."""
    python = find_python()
    if python is None:
        raise NotInstalled
    options = Options(
        python=python,
        port=free_port(),
        api_key=secrets.token_urlsafe(32),
        master_address=master_address,
        device_bytes=_device_bytes(),
        visible=tuple(word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()),
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        extra=extra,
    )
    return render(plan, model, options, node)


def _device_bytes() -> int:
    """The smallest GPU's memory; 0 where there is none."""
    from windlass.machine.probe import probe

    return min((device.memory_bytes for device in probe(measure=False).devices if device.kind == "cuda"), default=0)

"""A Launch as a saved plan decided it, checked against the options and the files that are there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from windlass.core.constants import BLOCK_TOKENS
from windlass.core.launch import KV_TYPES, LOAD_SCHEMES, Launch
from windlass.core.model import ModelSpec
from windlass.core.plan import Plan, load_plan
from windlass.core.ranks.epoch import EpochPlan, planned_epoch
from windlass.core.scheme import SCHEME_NAMES, kv_token_bytes
from windlass.errors import BadInput, DoesNotFit, Impossible
from windlass.units import format_bytes

if TYPE_CHECKING:
    from windlass.open.resolve import ModelDescription


def read_plan(file: Path) -> Plan:
    try:
        return load_plan(file.read_bytes())
    except OSError as error:
        raise BadInput(f"{file} cannot be read: {error.strerror}") from None


def apply_plan(launch: Launch, plan: Plan) -> Launch:
    """What the plan decided. An option that contradicts it is refused."""
    _check_runnable(plan)
    _check_model(plan, Path(launch.model), launch.quant)
    _check_options(launch, plan)
    planned = planned_epoch(plan) if plan.layout.world > 1 else None
    _check_machines(planned, len(launch.workers))
    on_cpus = all(held.name.startswith("cpu") for held in plan.memory.per_device)
    return msgspec.structs.replace(
        launch,
        device="cpu" if on_cpus and launch.device == "auto" else launch.device,
        kv=plan.scheme.kv,
        context_tokens=plan.workload.context_tokens,
        max_sequences=plan.workload.concurrency,
        kv_bytes=_in_blocks(_kv_bytes(plan), plan.workload.context_tokens),
        layout=plan.layout,
        planned=planned,
        tiers=plan.tiers,
        host_memory=_host_memory(launch, plan),
    )


def _host_memory(launch: Launch, plan: Plan) -> int | None:
    """A placement on CPUs is for the memory that the plan was given; beside a GPU, host memory is what is free."""
    if not plan.tiers or launch.host_memory is not None or any(one.device_bytes for one in plan.tiers):
        return launch.host_memory
    return max(held.capacity_bytes for held in plan.memory.per_device) * launch.ranks_per_machine


def _check_options(launch: Launch, plan: Plan) -> None:
    if launch.layout.world > 1:
        raise BadInput("the plan decides how the model is split; leave --tp, --pp and --ep out")
    if launch.kv not in (None, plan.scheme.kv):
        raise BadInput(f"--kv {launch.kv} contradicts the plan ({plan.scheme.kv}); leave it out, or plan with it")
    if plan.scheme.kv not in KV_TYPES:
        raise Impossible(f"the plan keeps the KV cache in {plan.scheme.kv}; this engine keeps it in {' or '.join(KV_TYPES)}")
    if launch.context_tokens not in (None, plan.workload.context_tokens):
        raise BadInput(
            f"--context {launch.context_tokens:,} contradicts the plan ({plan.workload.context_tokens:,}); leave it out, or plan with it"
        )


def _check_machines(planned: EpochPlan | None, num_workers: int) -> None:
    """As many machines as the plan is for: this one and the workers."""
    needed = len(set(planned.nodes)) if planned is not None else 1
    if needed == num_workers + 1:
        return
    if needed == 1:
        raise BadInput(f"the plan is for this machine alone; leave --workers out, or plan for {num_workers + 1} machines")
    others = f"{needed - 1} worker{'s' if needed > 2 else ''}"
    given = f"{num_workers} {'is' if num_workers == 1 else 'are'} named" if num_workers else "none is named"
    raise BadInput(
        f"the plan is for {needed} machines, this one and {others}, and {given}; add --workers HOST:PORT,..., or plan again"
    )


def _kv_bytes(plan: Plan) -> int:
    """Of the whole model. A plan has the KV bytes of each device, and devices may hold copies."""
    if plan.layout.world == 1 or plan.spec is None:
        return plan.memory.per_device[0].kv_bytes
    tokens = plan.workload.context_tokens * plan.workload.concurrency
    return kv_token_bytes(plan.spec, plan.scheme.kv) * tokens


def _in_blocks(kv_bytes: int, context_tokens: int) -> int:
    """Rounded up to whole blocks."""
    return -(-kv_bytes * (-(-context_tokens // BLOCK_TOKENS) * BLOCK_TOKENS) // context_tokens)


def _check_runnable(plan: Plan) -> None:
    if plan.train is not None:
        raise BadInput("this is a training plan; `windlass plan MODEL --save plan.json` makes one for inference")
    if not plan.fits:
        raise DoesNotFit(
            f"the plan does not fit: {format_bytes(plan.short_bytes)} short; plan with less --context, a smaller --quant or more hardware",
            plan.short_bytes,
        )
    if plan.engine != "windlass":
        raise Impossible(f"the plan is for {plan.engine}; plan with --engine windlass")
    if plan.layout.dp > 1:
        raise Impossible(f"the plan has {plan.layout.dp} replicas, which are separate servers; plan with --dp 1")
    on_gpus = any(one.device_bytes for one in plan.tiers)
    if on_gpus and any(one.host_units or one.disk_units for one in plan.tiers):
        raise Impossible("the plan streams matrices to a GPU, which this engine does not do; plan again with this version")
    if on_gpus and plan.layout.tp > 1:
        raise Impossible(
            f"the plan splits layers over GPUs (tp {plan.layout.tp}) and keeps weights in host memory: beside GPUs whole layers are needed; plan "
            "with --pp"
        )


def _check_model(plan: Plan, path: Path, quant: str | None) -> None:
    """The same files, or their conversion to the planned scheme, while loading (`quant`) or before."""
    from windlass.open.resolve import describe_path

    found = describe_path(path)
    stored = _held_as(found, plan)
    same = plan.checkpoint is not None and plan.checkpoint.digest == found.digest
    alike = plan.spec is not None and _shape(plan.spec) == _shape(found.spec)
    known = plan.checkpoint is not None and plan.checkpoint.digest != ""
    if not same and not alike:
        raise BadInput(f"the plan is for {plan.model.name}, and {path} is another model; plan again, or give the planned model")
    if (quant or stored) != plan.scheme.name:
        way = f"add --quant {plan.scheme.name}, or " if stored == "bf16" and plan.scheme.name in LOAD_SCHEMES else ""
        raise BadInput(
            f"the plan is for {plan.scheme.name} weights, and those of {path} are {quant or stored}; "
            f"{way}`windlass convert {path} OUT --quant {plan.scheme.name}`, then run OUT"
        )
    if known and not same and stored == "bf16":
        raise BadInput(f"the files of {path} are not those the plan was made for (their digest differs); plan again")


def _held_as(found: ModelDescription, plan: Plan) -> str:
    """The scheme that the files' matrices are held in on the planned devices."""
    files = found.files
    if files is None or files.scheme is None:
        return found.spec.native_scheme if found.spec.native_scheme in SCHEME_NAMES else "bf16"
    on_cpus = all(held.name.startswith("cpu") for held in plan.memory.per_device)
    return files.scheme.name if on_cpus or not files.only_on_cpus else "bf16"


def _shape(spec: ModelSpec) -> ModelSpec:
    """What conversion does not change."""
    return msgspec.structs.replace(spec, name="", native_scheme="", next_token=None, head_copy=False, stop_token_ids=())

"""What to run and how: the command line's words, or a saved plan's decisions, checked against the files that are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from windlass.cli.open.fleet import Over
from windlass.cli.run.options import Options
from windlass.core.model import Frozen, ModelSpec, kv_bytes_per_token
from windlass.core.plan import Plan, load_plan
from windlass.core.ranks.epoch import EpochPlan, planned_epoch
from windlass.errors import BadInput, DoesNotFit, Impossible
from windlass.units import format_bytes, parse_context

DEVICES = ("auto", "cpu", "cuda", "mps")
KV_TYPES = ("bf16", "fp32")
BLOCK_TOKENS = 16
"""As in kernels.step, which imports torch."""


class Wanted(Frozen):
    """All that an engine needs to be told."""

    path: Path
    device: str = "auto"
    kv: str = "bf16"
    context_tokens: int | None = None
    """None: the engine's own choice."""
    max_sequences: int | None = None
    kv_bytes: int | None = None
    """For keys and values; None: what the sequences can usually fill."""
    exact: bool = False
    over: Over = Over()


def wanted(path: Path, options: Options) -> Wanted:
    if options.device.split(":")[0] not in DEVICES:
        raise BadInput(f"--device is cpu, cuda or mps, not {options.device!r}")
    if options.kv is not None and options.kv not in KV_TYPES:
        raise BadInput(f"--kv is {' or '.join(KV_TYPES)}, not {options.kv!r}")
    context = parse_context(options.context) if options.context is not None else None
    if context is not None and context < 2:
        raise BadInput("--context must be at least two tokens: one of a prompt and one of an answer")
    _check_over(options)
    asked = Wanted(
        path=path,
        device=options.device,
        kv=options.kv or "bf16",
        context_tokens=context,
        exact=options.exact,
        over=options.over,
    )
    return asked if options.plan is None else _as_planned(asked, options, read_plan(options.plan))


def _check_over(options: Options) -> None:
    options.over.check()
    if options.plan is not None and options.over.layout.world > 1:
        raise BadInput("a plan says itself how a model is split; leave --tp and --pp out")


def read_plan(file: Path) -> Plan:
    try:
        return load_plan(file.read_bytes())
    except OSError as error:
        raise BadInput(f"{file} cannot be read: {error.strerror}") from None


def _as_planned(asked: Wanted, options: Options, plan: Plan) -> Wanted:
    """What the plan decided. A word on the command line that says otherwise is a misunderstanding, and said."""
    _check_runnable(plan)
    _check_model(plan, asked.path)
    if options.kv not in (None, plan.scheme.kv):
        raise BadInput(f"--kv {options.kv} is not what the plan says ({plan.scheme.kv}); leave it out, or plan with it")
    if plan.scheme.kv not in KV_TYPES:
        raise Impossible(f"the plan keeps keys and values in {plan.scheme.kv}; here they are kept in {' or '.join(KV_TYPES)}")
    if asked.context_tokens not in (None, plan.workload.context_tokens):
        raise BadInput(
            f"--context {options.context} is not what the plan says ({plan.workload.context_tokens:,}); leave it out, or plan with it"
        )
    planned = planned_epoch(plan) if plan.layout.world > 1 else None
    _check_machines(planned, len(options.over.names))
    on_cpus = all(held.name.startswith("cpu") for held in plan.memory.per_device)
    return msgspec.structs.replace(
        asked,
        device="cpu" if on_cpus and asked.device == "auto" else asked.device,
        kv=plan.scheme.kv,
        context_tokens=plan.workload.context_tokens,
        max_sequences=plan.workload.concurrency,
        kv_bytes=_in_blocks(_kv_bytes(plan), plan.workload.context_tokens),
        over=msgspec.structs.replace(asked.over, layout=plan.layout, planned=planned),
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
        f"the plan is for {needed} machines, this one and {others}, and {given}; say --workers HOST:PORT,..., or plan again"
    )


def _kv_bytes(plan: Plan) -> int:
    """Of the whole model. A plan has those of each device, of which several may hold the same."""
    if plan.layout.world == 1 or plan.spec is None:
        return plan.memory.per_device[0].kv_bytes
    tokens = plan.workload.context_tokens * plan.workload.concurrency
    return kv_bytes_per_token(plan.spec, plan.scheme.kv_element_bytes) * tokens


def _in_blocks(kv_bytes: int, context_tokens: int) -> int:
    """A cache is made of whole blocks."""
    return -(-kv_bytes * (-(-context_tokens // BLOCK_TOKENS) * BLOCK_TOKENS) // context_tokens)


def _check_runnable(plan: Plan) -> None:
    if plan.train is not None:
        raise BadInput("the plan is one of training; `windlass plan MODEL --save plan.json` makes one for running")
    if not plan.fits:
        raise DoesNotFit(f"the plan itself says that it does not fit: {format_bytes(plan.short_bytes)} short", plan.short_bytes)
    if plan.engine != "windlass":
        raise Impossible(f"the plan is for {plan.engine}; plan with --engine windlass")
    if plan.layout.dp > 1:
        raise Impossible(f"the plan has {plan.layout.dp} copies of the model, which are servers of their own; plan with --dp 1")
    if plan.memory.host_bytes or plan.memory.disk_bytes:
        raise Impossible("the plan keeps weights outside the device, which is not built yet; plan with a smaller --quant")


def _check_model(plan: Plan, path: Path) -> None:
    """The same files, or a conversion of them into what was planned."""
    if not path.is_dir():
        raise BadInput(f"--plan is for model directories; {path} has no config.json that a plan could have been made from")
    from windlass.cli.open.resolve import from_path
    from windlass.formats.config import read_config

    found, (stored, _) = from_path(path), stored_scheme(read_config(path))
    same = plan.checkpoint is not None and plan.checkpoint.digest == found.digest
    alike = plan.spec is not None and _shape(plan.spec) == _shape(found.spec)
    known = plan.checkpoint is not None and plan.checkpoint.digest != ""
    if not same and not alike:
        raise BadInput(
            f"the plan was made for {plan.model.name}, and {path} is another model; plan it, or give the model it was made for"
        )
    if stored != plan.scheme.name:
        raise BadInput(
            f"the plan is for {plan.scheme.name} weights, and those of {path} are {stored}; "
            f"`windlass convert {path} OUT --quant {plan.scheme.name}`, then run OUT"
        )
    if known and not same and stored == "bf16":
        raise BadInput(f"the files of {path} are not those the plan was made for (their digest differs); plan again")


def _shape(spec: ModelSpec) -> ModelSpec:
    """What does not change when a model is converted."""
    return msgspec.structs.replace(spec, name="", native_scheme="", next_token=None, head_copy=False, stop_token_ids=())


class _Weights(msgspec.Struct):
    num_bits: int
    type: str = "int"
    group_size: int | None = None


class _Group(msgspec.Struct):
    weights: _Weights | None = None


class _Quantization(msgspec.Struct):
    """Of compressed-tensors, as far as it is asked for here."""

    quant_method: str = ""
    config_groups: dict[str, _Group] = {}


def stored_scheme(config: dict[str, Any]) -> tuple[str, int | None]:
    """How a directory's matrices are stored, from its config.json: int4, int8, fp8, mxfp4 or bf16 (any plain floats), and the group."""
    if not config.get("quantization_config"):
        return "bf16", None
    try:
        section = msgspec.convert(config["quantization_config"], _Quantization)
    except msgspec.ValidationError:
        return "unknown", None
    found = next((group.weights for group in section.config_groups.values() if group.weights is not None), None)
    if section.quant_method != "compressed-tensors" or found is None:
        return section.quant_method, None
    kind = "fp" if found.type == "float" else "int"
    return f"{kind}{found.num_bits}", found.group_size if found.group_size and found.group_size > 0 else None

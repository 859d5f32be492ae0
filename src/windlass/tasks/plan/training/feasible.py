"""Which training layouts a model allows, with messages about heads, experts, layers and sequences. Knows no memory and no time."""

from __future__ import annotations

from windlass.core.hardware.spec import Hardware
from windlass.core.model import Attention, Dense, LearnedPositions, ModelSpec
from windlass.core.recipe.sections import Compute, DataSection, Offload
from windlass.errors import BadInput, Impossible
from windlass.tasks.plan.inference.feasible import divisors
from windlass.tasks.plan.training.job import TrainingJob


def check_precision(hardware: Hardware, compute: Compute) -> None:
    device = hardware.devices[0]
    if compute == "fp8" and device.kind != "cpu" and "fp8" not in device.flops:
        raise Impossible(f'{device.name} has no 8-bit floating-point units; use precision.compute = "bf16"')


def check_hardware(hardware: Hardware, offload: Offload = "none") -> None:
    if not hardware.devices:
        raise BadInput("the hardware has no devices")
    if not hardware.uniform:
        raise Impossible("training needs equal devices in equal nodes: every rank waits for the slowest one in every step")
    if offload == "cpu" and hardware.devices[0].kind == "cpu":
        raise Impossible("memory.offload = 'cpu' has no effect on CPUs: their memory is host memory; remove it")


def check_sequence(spec: ModelSpec, sequence_tokens: int, data: DataSection) -> None:
    if isinstance(spec.positions, LearnedPositions) and sequence_tokens > spec.positions.max_positions:
        raise Impossible(
            f"sequences of {sequence_tokens} tokens are too long for {spec.name or 'the model'}:"
            f" it has {spec.positions.max_positions} learned position embeddings"
        )
    if sequence_tokens > spec.context_tokens and not data.allow_longer_context:
        raise Impossible(
            f"sequence length {sequence_tokens:,} exceeds the {spec.context_tokens:,} tokens of {spec.name or 'the model'};"
            f" use --sequence {spec.context_tokens} or less, or set data.allow_longer_context = true to extend the context"
        )


def why_not_tp(spec: ModelSpec, tp: int) -> str | None:
    """The reason in one line, or None if it is valid."""
    heads = spec.attention.num_heads
    if heads % tp:
        return f"tp {tp} splits a head: {heads} heads are not a multiple of {tp}; tp may be {_listed(divisors(heads))}"
    if isinstance(spec.attention, Attention) and spec.attention.num_kv_heads % tp and tp % spec.attention.num_kv_heads:
        kept = spec.attention.num_kv_heads
        return f"tp {tp} is neither a divisor nor a multiple of {kept} KV heads; tp may be {_listed(_kv_degrees(heads, kept))}"
    for width, what in _widths(spec):
        if width % tp:
            return f"tp {tp} does not divide the {what} width of {width}; tp may be {_listed(_common(heads, width))}"
    return None


def _kv_degrees(heads: int, kv_heads: int) -> list[int]:
    return [degree for degree in divisors(heads) if kv_heads % degree == 0 or degree % kv_heads == 0]


def _common(heads: int, width: int) -> list[int]:
    return [degree for degree in divisors(heads) if width % degree == 0]


def _widths(spec: ModelSpec) -> list[tuple[int, str]]:
    found: dict[int, str] = {}
    for layer in spec.layers:
        ffn = layer.feed_forward
        if isinstance(ffn, Dense):
            found[ffn.intermediate_size] = "feed-forward"
        elif ffn.shared_intermediate_size:
            found[ffn.shared_intermediate_size] = "shared-expert"
    return list(found.items())


def why_not_ep(spec: ModelSpec, ep: int, expert_tp: int) -> str | None:
    moe = spec.experts
    if moe is None:
        return None if ep * expert_tp == 1 else f"ep {ep} x expert_tp {expert_tp}: the model has no routed experts"
    if moe.num_experts % ep:
        return f"ep {ep} does not divide {moe.num_experts} experts; ep may be {_listed(divisors(moe.num_experts))}"
    if moe.intermediate_size % expert_tp:
        return f"expert_tp {expert_tp} does not divide the expert width of {moe.intermediate_size}"
    return None


def why_not(spec: ModelSpec, job: TrainingJob) -> str | None:
    """All checks of a job whose degrees match the devices."""
    groups = job.groups
    return why_not_tp(spec, groups.tp) or why_not_ep(spec, groups.ep, groups.expert_tp) or why_not_job(spec, job)


def why_not_job(spec: ModelSpec, job: TrainingJob) -> str | None:
    """The same, without the checks of tp and ep."""
    groups = job.groups
    if groups.pp > spec.num_layers:
        return f"pp {groups.pp} is more than the model's {spec.num_layers} layers"
    if job.global_batch % (groups.dp * job.micro_batch):
        return (
            f"global batch {job.global_batch} is not divisible by dp {groups.dp} x micro-batch {job.micro_batch}:"
            f" {job.global_batch} is not a multiple of {groups.dp * job.micro_batch}"
        )
    return _why_not_schedule(spec, job) or _why_not_sequence(job)


def _why_not_schedule(spec: ModelSpec, job: TrainingJob) -> str | None:
    groups = job.groups
    per_stage = -(-spec.num_layers // groups.pp)
    if job.virtual_stages > 1 and groups.pp == 1:
        return f"virtual_stages {job.virtual_stages} needs pipeline parallelism; pp is 1"
    if job.virtual_stages > per_stage:
        return f"virtual_stages {job.virtual_stages} is more than the {per_stage} layers of a stage"
    if job.schedule == "dualpipe" and groups.pp % 2:
        return f"dualpipe needs an even pp; it is {groups.pp}"
    if job.zero == 3 and groups.pp > 1:
        return "zero 3 with pp > 1 would gather every stage's weights for every micro-batch; use zero 1 or 2, or pp 1"
    return None


def _why_not_sequence(job: TrainingJob) -> str | None:
    groups = job.groups
    shards = groups.cp * (groups.tp if job.sequence_parallel else 1)
    if job.sequence_tokens % shards:
        return f"sequence length {job.sequence_tokens} is not a multiple of {shards} (tp x cp)"
    if groups.tp > 1 and groups.ep > 1 and not job.sequence_parallel:
        return (
            "tp with ep needs sequence parallelism (as in Megatron-Core): otherwise every tp rank would dispatch the same tokens"
        )
    return _why_not_offload(job)


def _why_not_offload(job: TrainingJob) -> str | None:
    """DeepSpeed needs tp 1 and pp 1; Megatron-Core's CPU optimizer works with any tp and pp."""
    alone = job.groups.tp * job.groups.pp == 1
    if job.offload == "nvme" and not alone:
        return "offload to nvme is DeepSpeed ZeRO, which needs tp 1 and pp 1; offload to cpu works with both"
    if job.offload == "cpu" and not alone and job.zero == 3:
        return "offload with tp or pp is Megatron-Core's CPU optimizer, which keeps whole weights; use zero 1 or 2"
    return None


def _listed(degrees: list[int] | tuple[int, ...]) -> str:
    return ", ".join(map(str, degrees[:12]))

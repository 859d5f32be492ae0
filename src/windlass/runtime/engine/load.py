"""From a Launch to an engine that is ready. What does not fit is refused before anything large is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import msgspec
import torch

from windlass.core.fused import KV_TYPES as FUSED_KV_TYPES
from windlass.core.fused import unsupported
from windlass.core.launch import Launch, RandomInit, check_quant
from windlass.core.model import ModelSpec
from windlass.core.place import local_bytes, local_experts, place, stored
from windlass.core.request import Info
from windlass.core.rule import ModelPart, Rule
from windlass.core.scheme import Scheme, kv_token_bytes, scheme
from windlass.core.tiers.demand import planned_tensors
from windlass.errors import BadInput, Impossible, UnknownName
from windlass.model.families import describe, rules
from windlass.runtime.engine.adapters import add_adapters
from windlass.runtime.engine.engine import Engine
from windlass.runtime.engine.execute.deterministic import check_deterministic, check_order_is_fixed
from windlass.runtime.engine.execute.runner import Runner
from windlass.runtime.engine.memory import (
    OTHER_STEP_TOKENS,
    STEP_TOKENS,
    block_bytes,
    cache_bytes,
    defaults_of,
    limits_for,
    max_sequences,
    spare_bytes,
)
from windlass.runtime.engine.speculate.setup import check_draft_model, speculation_for, wants_mtp
from windlass.runtime.engine.tiers import RankWeights, build_decoder
from windlass.runtime.engine.timeline import mark
from windlass.runtime.machine.system import this_system
from windlass.runtime.nn.decoder import Decoder
from windlass.runtime.nn.parallel.shard import WHOLE, ModelShard
from windlass.runtime.weights.load.checkpoint import CheckpointWeights
from windlass.runtime.weights.load.prefetch import trim_heap
from windlass.runtime.weights.load.quantizing import quantized
from windlass.runtime.weights.load.random import RandomWeights
from windlass.runtime.weights.schemes import cutting_scheme
from windlass.runtime.weights.source import check_runnable, open_model
from windlass.runtime.weights.transfer.store import open_partial

KV_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp32": torch.float32}
FP8_CAPABILITY = (8, 9)
"""GPUs from this on convert fp8 in hardware."""
DEVICES = ("cpu", "cuda", "mps")
HOPPER = 9
"""The major compute capability that runtime/kernels/cuda is written for."""

Progress = Callable[[int, int], None]
"""Bytes read, and of how many."""


ShardOf = Callable[[ModelSpec, tuple[Rule, ...], Callable[[], Scheme]], ModelShard]
"""Chooses the shard to build, from the spec, its rules and, on demand, the storage scheme."""


class LoadedDecoder(NamedTuple):
    decoder: Decoder
    weights_bytes: int
    stored_as: str
    device: str
    kv_bytes: int | None = None
    """The cache that memory was left for, where weights are offloaded."""
    offloaded: str = ""
    """What went where; empty: all is in memory."""
    max_sequences: int | None = None
    step_tokens: int | None = None
    """Limits that offloading sets; see BuiltDecoder."""
    arriving: AbstractContextManager[object] = nullcontext()
    """Within, weights may still be on their way; at its end all are there."""


def load_model(launch: Launch, progress: Progress | None = None) -> tuple[Engine, Info]:
    """A whole model on one device."""
    began = time.perf_counter()
    device = chosen_device(launch.device)
    if _kind(device) == "cuda":
        Thread(target=_make_context, args=(device,), daemon=True).start()
    # Compiling, graphs and first prompts take as long as reading: they need the weights' addresses, not their numbers.
    # The head with which an MTP layer drafts is made from numbers.
    built = build(launch, device, progress, wait=launch.speculate in ("auto", "mtp"))
    mark("decoder built")
    launch = with_limits(launch, built)
    with built.arriving:
        engine = make_engine(launch, built.decoder, device, drafting=draft_decoder(launch, built.decoder, device))
        if launch.adapters:
            add_adapters(launch, engine)
        if _kind(device) == "cuda":
            mark("KV cache allocated")
            engine.warm_up()
            mark("prompts tried")
    return engine, make_info(launch, engine, built, device, time.perf_counter() - began)


def _make_context(device: str) -> None:
    """The device's context, which takes some tenths of a second, while files are opened."""
    with suppress(Exception):  # the thread that loads meets the same
        torch.zeros(1, device=device)


def with_limits(launch: Launch, built: LoadedDecoder) -> Launch:
    """With what the placement of the weights has left room for."""
    if built.kv_bytes is None:
        return launch
    sequences = min(launch.max_sequences or built.max_sequences or 0, built.max_sequences or launch.max_sequences or 0)
    return msgspec.structs.replace(
        launch,
        kv_bytes=built.kv_bytes,
        max_sequences=sequences or None,
        max_step_tokens=launch.max_step_tokens or built.step_tokens,
        speculate="off" if built.step_tokens and launch.speculate == "auto" else launch.speculate,
    )


def build(
    launch: Launch,
    device: str,
    progress: Progress | None = None,
    shard_of: ShardOf = lambda *_: WHOLE,
    parts: str = "",
    *,
    wait: bool = True,
) -> LoadedDecoder:
    """`parts`: a folder of received weight slices, read instead of the checkpoint. `wait`: until all weights are there; else see `arriving`."""
    check_kv(launch.kv_type, device)
    if launch.deterministic:
        check_deterministic(device)
    if launch.random_weights is not None:
        built = _random(launch, launch.random_weights, device, shard_of)
    else:
        built = _from_checkpoint(launch, device, progress, shard_of, parts)
    if wait:
        with built.arriving:
            pass
        built = built._replace(arriving=nullcontext())
    trim_heap()
    if _kind(device) == "cuda":
        torch.cuda.empty_cache()  # of what was read on its way to its place
    return built


def _from_checkpoint(launch: Launch, device: str, progress: Progress | None, shard_of: ShardOf, parts: str) -> LoadedDecoder:
    check_quant(launch)
    opened = open_partial(Path(parts)) if parts else open_model(Path(launch.model))
    mark("files opened")
    try:
        opened = quantized(opened, launch.quant)
        dtype = torch.float32 if launch.exact else None
        shard = shard_of(opened.spec, opened.rules, partial(cutting_scheme, opened))
        weights = CheckpointWeights(
            opened,
            placement=shard.placement,
            tp_index=shard.tp_index,
            layers=shard.layers(opened.spec),
            device=device,
            dtype=dtype,
            keep_quantized=not launch.exact,
            tiled=_uses_tiles(launch, shard, opened.spec, device),
            progress=progress,
        )
        stored_as = "fp32" if launch.exact else _most_of(weights.storage())
        identity = {"digest": opened.digest, "exact": launch.exact, "quant": launch.quant}
        num_bytes = weights.memory_bytes() + (weights.mtp_bytes() if wants_mtp(launch, opened.spec, shard) else 0)
        rank = RankWeights(opened.spec, shard, weights, num_bytes, weights.held_tensors, identity)
        with ExitStack() as begun:
            begun.callback(weights.close)
            built = _loaded(launch, device, rank, stored_as)
            begun.pop_all()
        return built._replace(arriving=_arriving(weights))
    finally:
        opened.store.close()


@contextmanager
def _arriving(weights: CheckpointWeights) -> Generator[None]:
    try:
        yield
        weights.finish()
    finally:
        weights.close()
    state = weights.background_state
    if state is not None:
        mark("first byte read", state.first)
        mark(f"last byte read ({state.num_bytes / max(state.last - state.first, 1e-9) / 1e9:.1f} GB/s)", state.last)
    mark("weights there")


def _random(launch: Launch, asked: RandomInit, device: str, shard_of: ShardOf) -> LoadedDecoder:
    spec = describe(asked.config, launch.model)
    check_runnable(spec)
    how = scheme(asked.scheme, asked.group, launch.kv_type)
    table = rules(spec)
    shard = shard_of(spec, table, lambda: how)
    weights_bytes = _planned_bytes(table, how) if shard.placement is None else _shard_bytes(spec, table, shard, how)
    if wants_mtp(launch, spec, shard):
        weights_bytes += _planned_bytes(table, how, ModelPart.NEXT_TOKEN)
    weights = RandomWeights(
        spec,
        table,
        quant=how,
        seed=asked.seed,
        placement=shard.placement,
        tp_index=shard.tp_index,
        device=device,
        tiled=_uses_tiles(launch, shard, spec, device),
    )
    placement = shard.placement or place(table, spec.num_layers, shard.layout, how)
    tensors = partial(planned_tensors, table, spec, placement, shard.layout, how, shard.tp_index, shard.layers(spec))
    identity = {"config": asked.config, "scheme": msgspec.to_builtins(how), "seed": asked.seed}
    return _loaded(launch, device, RankWeights(spec, shard, weights, weights_bytes, tensors, identity), how.name)


def _loaded(launch: Launch, device: str, weights: RankWeights, stored_as: str) -> LoadedDecoder:
    free = free_bytes(device) // ranks_per_device(launch, device)
    built = build_decoder(launch, device, weights, free, _context(weights.spec, launch))
    limits = built.max_sequences, built.step_tokens
    return LoadedDecoder(built.decoder, weights.num_bytes, stored_as, device, built.kv_bytes, built.line, *limits)


def _uses_tiles(launch: Launch, shard: ModelShard, spec: ModelSpec, device: str) -> bool:
    """Whether the fused Hopper kernels run it, all layers or a stage. Stages hand each other rows as the fused pass has them, so that all of them
    take it or none; of GPUs of other machines nothing is known here."""
    if _kind(device) != "cuda" or torch.version.hip is not None or launch.adapters or not shard.has_whole_layers:
        return False
    if not shard.is_whole and launch.workers:
        return False
    devices = [device] if shard.is_whole else range(torch.cuda.device_count())
    is_hopper = all(torch.cuda.get_device_capability(one)[0] == HOPPER for one in devices)
    return is_hopper and launch.kv_type in FUSED_KV_TYPES and not unsupported(spec)


def _context(spec: ModelSpec, launch: Launch) -> int | None:
    """Checked before anything large is read."""
    if launch.context_tokens is not None and launch.context_tokens > spec.context_tokens:
        raise BadInput(
            f"--context {launch.context_tokens:,} exceeds the {spec.context_tokens:,} tokens of {spec.name or 'the model'}; lower it"
        )
    return launch.context_tokens


def draft_decoder(launch: Launch, decoder: Decoder, device: str) -> Decoder | None:
    """The small model that drafts, if there is one: whole, on the same device."""
    if not launch.draft_model:
        return None
    small = Launch(model=launch.draft_model, device=device, kv=launch.kv, exact=launch.exact, context_tokens=None)
    built = build(small, device).decoder
    check_draft_model(decoder, built)
    return built


def make_engine(
    launch: Launch,
    decoder: Decoder,
    device: str,
    *,
    cache_share: float = 1.0,
    record: bool = True,
    runner: type[Runner] = Runner,
    drafting: Decoder | None = None,
) -> Engine:
    """`cache_share`: the fraction of a token's KV bytes that this rank holds. `drafting`: a model that drafts."""
    spec, defaults = decoder.spec, defaults_of(_kind(device))
    speculation = speculation_for(launch, decoder, drafting)
    speculation.make_weights()
    cache_share *= 1 + speculation.cache_bytes(launch.kv_type) / kv_token_bytes(spec, launch.kv_type)
    available = launch.kv_bytes or spare_bytes(int(_free_under_cap(launch, device) / cache_share), defaults)
    sizes = spec, launch.kv_type, launch.context_tokens
    num_sequences = launch.max_sequences or max_sequences(*sizes, available, defaults)
    kv_bytes = launch.kv_bytes or cache_bytes(*sizes, num_sequences, available, defaults)
    limits = limits_for(
        spec,
        launch.kv_type,
        kv_bytes,
        context=launch.context_tokens,
        num_sequences=num_sequences,
        step_tokens=launch.max_step_tokens or STEP_TOKENS.get(_kind(device), OTHER_STEP_TOKENS),
        model_context=decoder.context_tokens,
        lookahead=_kind(device) == "cuda",
        max_drafts=speculation.max_drafts,
    )
    spare = int(_kind(device) == "cuda")  # see Runner
    caches = decoder.make_caches(limits.num_blocks + spare, KV_DTYPES[launch.kv_type], device)
    num_tokens = min(launch.num_tokens or spec.vocab_size, spec.vocab_size)
    engine = Engine(
        decoder, caches, limits, num_tokens, device=device, record=record, runner=runner, is_invariant=launch.deterministic
    )
    if launch.deterministic:
        check_order_is_fixed(engine.runner, decoder)
    engine.speculation = speculation.made(engine.runner, limits, num_tokens, KV_DTYPES[launch.kv_type], device, spare)
    return engine


def make_info(launch: Launch, engine: Engine, built: LoadedDecoder, device: str, seconds: float) -> Info:
    spec, runner = built.decoder.spec, engine.runner
    return Info(
        model=spec.name,
        context_tokens=engine.limits.longest_sequence,
        vocab_size=spec.vocab_size,
        max_sequences=engine.limits.max_sequences,
        stop_token_ids=spec.stop_token_ids,
        device=device,
        scheme=built.stored_as,
        kv=launch.kv_type,
        weights_bytes=built.weights_bytes,
        kv_bytes=engine.limits.num_blocks * block_bytes(spec, launch.kv_type),
        load_seconds=seconds,
        details={
            "steps": runner.mode,
            **({"offload": built.offloaded} if built.offloaded else {}),
            **({"deterministic": "tokens do not depend on the batch"} if launch.deterministic else {}),
            **({} if engine.speculation is None else {"speculation": engine.speculation.described}),
        },
    )


def chosen_device(asked: str) -> str:
    """`auto` takes a GPU if PyTorch sees one."""
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind = _kind(asked)
    if kind not in DEVICES:
        raise UnknownName("device", asked, DEVICES)
    if kind == "cuda" and not torch.cuda.is_available():
        raise Impossible("this PyTorch sees no CUDA or ROCm device; run with --device cpu, or install a build that has them")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise Impossible("this machine has no Metal device that PyTorch can use; run with --device cpu")
    return asked


def check_kv(kv: str, device: str) -> None:
    if kv not in KV_DTYPES:
        raise UnknownName("KV type", kv, KV_DTYPES)
    if kv != "fp8" or _kind(device) == "cpu":
        return
    if _kind(device) != "cuda" or torch.version.hip is not None:
        which = "AMD GPUs" if _kind(device) == "cuda" else device
        raise Impossible(f"--kv fp8 is for NVIDIA GPUs and CPUs, not for {which}; leave it out (bf16)")
    if (found := torch.cuda.get_device_capability(device)) < FP8_CAPABILITY:
        raise Impossible(
            f"--kv fp8 needs a GPU of compute capability {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or later (Ada, Hopper), and "
            f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}; leave it out (bf16)"
        )


def free_bytes(device: str) -> int:
    if _kind(device) == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return this_system().ram_bytes


def ranks_per_device(launch: Launch, device: str) -> int:
    """Ranks of a machine take its GPUs in turn (runtime/engine/ranks/first.py); the ranks of a CPU are counted where its memory is."""
    if _kind(device) != "cuda":
        return 1
    return -(-launch.ranks_per_machine // torch.cuda.device_count())


def _free_under_cap(launch: Launch, device: str) -> int:
    """--gpu-memory counts weights and KV cache together; ranks that share a GPU have an equal part of it."""
    free = free_bytes(device)
    if _kind(device) != "cuda":
        return free
    held = torch.cuda.memory_reserved(device)
    return room_under(free, held, ranks_per_device(launch, device), min(launch.gpu_memory, default=None))


def room_under(free: int, held: int, ranks: int, cap: int | None) -> int:
    """Of a device with so many free bytes, on which this rank holds some: what it may still take."""
    share = (free + held) // ranks - held if ranks > 1 else free
    return max(min(free, share, free if cap is None else cap - held), 0)


def _kind(device: str) -> str:
    return device.split(":")[0]


def _most_of(storage: dict[str, int]) -> str:
    """The scheme that stores most bytes."""
    return max(storage, key=storage.__getitem__, default="")


def _planned_bytes(table: tuple[Rule, ...], how: Scheme, part: ModelPart = ModelPart.MAIN) -> int:
    """As `windlass convert` would store them."""
    held = [rule for rule in table if rule.part is part and rule.copy_of is None]
    return sum(_rule_bytes(rule, how) * rule.copies for rule in held)


def _shard_bytes(spec: ModelSpec, table: tuple[Rule, ...], shard: ModelShard, how: Scheme) -> int:
    """Of one rank; embedding and head are counted on every stage."""
    placement, (first, last) = shard.placement, shard.layers(spec)
    assert placement is not None
    experts = local_experts(placement, shard.layout, shard.tp_index)

    def copies(rule: Rule) -> int:
        layers = 1 if rule.layers is None else sum(first <= layer < last for layer in rule.layers)
        return layers * (experts if rule.num_experts else 1)

    held = [rule for rule in table if rule.part is ModelPart.MAIN and rule.copy_of is None]
    return sum(local_bytes(rule, placement, how, shard.tp_index) * copies(rule) for rule in held)


def _rule_bytes(rule: Rule, how: Scheme) -> int:
    shape: Any = rule.shape
    return stored(rule, how).matrix_bytes(*shape) if len(shape) == 2 else rule.elements * 4

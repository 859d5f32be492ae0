"""Which engines and schemes a request allows, in order of preference. Pure."""

from __future__ import annotations

import msgspec

from windlass.core.model import ModelSpec
from windlass.core.scheme import KV_BYTES, Scheme, scheme
from windlass.errors import Impossible
from windlass.tasks.plan.engines.classes import device_class
from windlass.tasks.plan.engines.load import NAMES, engine, loads_scheme
from windlass.tasks.plan.engines.profile import EngineProfile
from windlass.tasks.plan.engines.tried import not_run_yet
from windlass.tasks.plan.inference.advice import BATCH_FOR_SERVER
from windlass.tasks.plan.inference.search.request import PlanRequest


def runs_on(found: EngineProfile, request: PlanRequest) -> bool:
    return supports(found, request.spec) and not _unsupported_kinds(found, request)


def supports(found: EngineProfile, spec: ModelSpec) -> bool:
    """Peers take their models from the same published architectures as vLLM, which is asked for all of them."""
    return (found.name if found.name == "windlass" else "vllm") in spec.engines


def _unsupported_kinds(found: EngineProfile, request: PlanRequest) -> set[str]:
    """Device kinds that the engine does not support."""
    extra = found.kinds_on_request if request.engine == found.name else ()
    return {device.kind for device in request.hardware.distinct_devices} - {*found.kinds, *extra}


def engines(request: PlanRequest) -> list[EngineProfile]:
    """The one set with --engine, or all that run the model on these devices today; if none does, the embedded one for its memory model."""
    if request.engine != "auto":
        found = engine(request.engine)
        unsupported = _unsupported_kinds(found, request)
        if unsupported:
            raise Impossible(
                f"{found.title} does not support {', '.join(sorted(unsupported))} devices; use --engine {_for_kinds(request)}"
            )
        if request.spec.engines and not supports(found, request.spec):
            others = " or ".join(request.spec.engines)
            raise Impossible(f"{found.name} does not support {request.spec.name} ({request.spec.family}); use --engine {others}")
        _check_scheme(found, request)
        return [found]
    return [found for found in map(engine, _choices(request)) if runs_on(found, request) and _loads(found, request)] or [
        engine("windlass")
    ]


def _choices(request: PlanRequest) -> tuple[str, ...]:
    """Engines worth trying on these devices, without those paths of ours that were never run."""
    devices = request.hardware.distinct_devices
    kinds = {device.kind for device in devices}
    peers = (
        ("mlx", "llama.cpp")
        if kinds == {"metal"}
        else ("llama.cpp",)
        if "cpu" in kinds
        else ("vllm", "llama.cpp", "ktransformers")
    )
    if request.hardware.num_devices == 1 and device_class(devices[0]) in ("unified", "rdna"):
        peers = ("llama.cpp", "vllm")  # what people run there, and the faster of the two where both were measured
    one = 1 if kinds == {"cpu"} else request.hardware.num_devices
    tried = not not_run_yet(devices, one, offloads=False, to_disk=False, has_kernels=False)
    return ("windlass", *peers) if tried or request.last_resort else peers


def _for_kinds(request: PlanRequest) -> str:
    kinds = {device.kind for device in request.hardware.distinct_devices}
    return "mlx" if kinds == {"metal"} else "llama.cpp"


def _scheme_name(request: PlanRequest) -> str:
    return request.quant if request.quant != "auto" else request.stored.name if request.stored is not None else ""


def _loads(found: EngineProfile, request: PlanRequest) -> bool:
    own_files = found.name == "windlass" and request.quant == "auto"  # whatever Windlass has opened, it loads
    name = _scheme_name(request)
    has_cache = request.kv in found.caches or request.kv not in KV_BYTES
    return (not name or own_files or loads_scheme(found, name)) and has_cache and not _without_fp8_cache(found, request)


def _without_fp8_cache(found: EngineProfile, request: PlanRequest) -> tuple[str, ...]:
    """Names of GPUs on which the engine cannot keep an fp8 cache: ours needs one that converts fp8 in hardware (runtime/engine/load.py)."""
    if request.kv != "fp8" or found.name != "windlass":
        return ()
    devices = [device for device in request.hardware.distinct_devices if device.kind != "cpu"]
    return tuple(device.name for device in devices if device.kind != "cuda" or "fp8" not in device.flops)


def _check_scheme(found: EngineProfile, request: PlanRequest) -> None:
    if request.kv in KV_BYTES and request.kv not in found.caches:
        able = [name for name in NAMES if request.kv in engine(name).caches]
        raise Impossible(
            f"{found.title} has no KV cache in {request.kv}, only in {', '.join(found.caches)}; use --engine {' or '.join(able)}"
        )
    if names := _without_fp8_cache(found, request):
        raise Impossible(
            f"{found.title} keeps a KV cache in fp8 on CPUs and NVIDIA GPUs from Ada on, not on {', '.join(names)}; use --kv bf16"
        )
    if not _loads(found, request):
        able = [name for name in NAMES if loads_scheme(engine(name), _scheme_name(request))]
        raise Impossible(f"{found.title} does not load {_scheme_name(request)} files; use --engine {' or '.join(able) or 'auto'}")


def schemes(request: PlanRequest) -> list[Scheme]:
    """Least lossy first. Files that are quantized run as they are; a checkpoint published in fewer bits is not converted to more; fp8
    needs a device with units for it."""
    only = _cpu_schemes(request)
    if request.quant != "auto":
        if only and request.quant not in only:
            raise Impossible(
                f"{request.engine} supports {' and '.join(only)} on a CPU, not {request.quant}; use --engine windlass"
            )
        return [scheme(request.quant, request.group, request.kv)]
    if only:
        return [scheme(only[0], request.group, request.kv)]
    if request.stored is not None:
        return [msgspec.structs.replace(request.stored, kv=request.kv)]
    order = ["bf16", "fp8", "int8", "int4"]
    native = request.spec.native_scheme
    if native == "mxfp4":
        order = ["mxfp4", "int4"]
    elif native == "fp8":
        order = ["fp8", "int8", "int4"]
    if any("fp8" not in device.flops for device in request.hardware.distinct_devices):
        order = [name for name in order if name != "fp8"] or ["int8", "int4"]
    return [scheme(name, request.group, request.kv) for name in order]


def _cpu_schemes(request: PlanRequest) -> tuple[str, ...]:
    on_cpu = any(device.kind == "cpu" for device in request.hardware.distinct_devices)
    return engine(request.engine).cpu_schemes if on_cpu and request.engine != "auto" else ()


def preferred(request: PlanRequest, available: list[EngineProfile]) -> list[EngineProfile]:
    """The embedded engine first, unless the concurrency is high or the goal is throughput or cost."""
    many = request.concurrency > BATCH_FOR_SERVER if request.concurrency else request.goal != "latency"
    first = "vllm" if many else "windlass"
    return sorted(available, key=lambda found: found.name != first)

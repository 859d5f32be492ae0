"""Which layouts an engine accepts for a model, with an error message for those it does not. Pure; knows no speeds."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.core.layout import Layout
from windlass.core.model import Attention, Convolution, ModelSpec
from windlass.core.place import place, stored
from windlass.core.rule import AxisName, Rule
from windlass.core.scheme import Scheme
from windlass.errors import Impossible
from windlass.tasks.plan.engines.profile import EngineProfile


def check_layout(engine: EngineProfile, spec: ModelSpec, rules: tuple[Rule, ...], scheme: Scheme, layout: Layout) -> None:
    """Raises Impossible if the model cannot be split this way; does not check memory."""
    if layout.pp > spec.num_layers:
        raise Impossible(f"pp {layout.pp} is more than the {spec.num_layers} layers of {spec.name}")
    if layout.tp > 1 and any(isinstance(layer.mixer, Convolution) for layer in spec.layers):
        raise Impossible(f"tp {layout.tp}: {spec.name} supports pipeline parallelism only; use --pp {layout.tp}")
    _check_splits(engine, layout)
    _check_experts(engine, spec, layout)
    if engine.uneven:
        place(rules, spec.num_layers, layout, scheme)
    else:
        _check_even(engine, spec, rules, scheme, layout)


def _check_splits(engine: EngineProfile, layout: Layout) -> None:
    for name in ("tp", "pp", "ep", "dp"):
        degree = getattr(layout, name)
        if degree > 1 and name not in engine.splits:
            able = f"it splits by {' and '.join(engine.splits)}" if engine.splits else "it runs on one device"
            raise Impossible(f"{name} {degree}: {engine.title} does not split a model so; {able}")


def _check_experts(engine: EngineProfile, spec: ModelSpec, layout: Layout) -> None:
    experts = spec.experts
    if layout.ep == 1:
        return
    if experts is None:
        raise Impossible(f"ep {layout.ep}: {spec.name} has no experts")
    if experts.num_experts < layout.ep or (
        experts.num_experts % layout.ep and not (engine.uneven or (engine.redundant_experts and layout.ep > layout.tp))
    ):
        nearest = ", ".join(map(str, nearest_divisors(experts.num_experts, layout.ep)))
        raise Impossible(f"ep {layout.ep} does not divide the {experts.num_experts} experts of {spec.name}; ep may be {nearest}")
    if engine.experts_over_replicas:
        if layout.ep != layout.tp * layout.dp:
            raise Impossible(
                f"{engine.name} requires ep = 1 or ep = tp x dp: with tp {layout.tp} and dp {layout.dp}, "
                f"ep is 1 or {layout.tp * layout.dp}"
            )
    elif layout.tp % layout.ep:
        raise Impossible(
            f"ep {layout.ep} does not divide tp {layout.tp}: expert parallelism reuses the tp ranks; "
            f"use ep {' or '.join(map(str, divisors(layout.tp)))}"
        )


def _check_even(engine: EngineProfile, spec: ModelSpec, rules: tuple[Rule, ...], scheme: Scheme, layout: Layout) -> None:
    if layout.tp not in valid_tp(spec, layout.tp):
        raise Impossible(_heads_message(engine, spec, layout.tp))
    torn = _torn_group(rules, scheme, layout)
    if torn is not None:
        rule, part, group = torn
        raise Impossible(
            f"{engine.name} cannot split {_plain(rule.ours)} with tp {layout.tp}: {rule.shape[-1]} inputs are {part} per rank, "
            f"not a multiple of the group size {group}; use a smaller tp, --group 64 or 32, expert parallelism (--ep), or fp8"
        )


def working_layouts(
    engine: EngineProfile, spec: ModelSpec, rules: tuple[Rule, ...], scheme: Scheme, requested: Layout, num_devices: int
) -> str:
    """The accepted layouts of these devices that are nearest to `requested`, as text."""
    accepted: list[Layout] = []
    for layout in layouts(spec, engine, num_devices, {}):
        if layout.world != num_devices or layout.ep not in (1, requested.ep):
            continue
        try:
            check_layout(engine, spec, rules, scheme, layout)
        except Impossible:
            continue
        accepted.append(layout)
    accepted.sort(key=lambda one: (abs(one.tp - requested.tp), one.pp != requested.pp, one.dp))
    return ", or ".join(str(one) for one in accepted[:3])


def _heads_message(engine: EngineProfile, spec: ModelSpec, tp: int) -> str:
    mixer = spec.attention
    allowed = ", ".join(map(str, valid_tp(spec, 64)))
    if mixer.num_heads % tp:
        heads = mixer.num_heads
        problem = f"the {heads} attention heads of {spec.name} are not divisible by tp {tp} ({heads} % {tp} = {heads % tp})"
    else:
        assert isinstance(mixer, Attention)
        problem = f"the {mixer.num_kv_heads} KV heads of {spec.name} are neither a multiple nor a divisor of tp {tp}"
    return f"{problem}; {engine.name} accepts tp {allowed}"


def valid_tp(spec: ModelSpec, limit: int) -> tuple[int, ...]:
    """tp degrees that split heads evenly: heads % tp == 0, and KV heads divide or are divided by tp (the rule of vLLM and Megatron)."""
    mixer = spec.attention
    kv = mixer.num_kv_heads if isinstance(mixer, Attention) else None
    return tuple(tp for tp in divisors(mixer.num_heads) if tp <= limit and (kv is None or kv % tp == 0 or tp % kv == 0))


def _torn_group(rules: tuple[Rule, ...], scheme: Scheme, layout: Layout) -> tuple[Rule, int, int] | None:
    """The first matrix whose inputs an even split would cut within a quantization group."""
    for rule in rules:
        if len(rule.axes) != 2 or rule.axes[1].name not in (
            AxisName.HEADS,
            AxisName.FFN,
            AxisName.EXPERT_FFN,
            AxisName.SHARED_FFN,
        ):
            continue
        parts = layout.expert_tp if rule.axes[1].name is AxisName.EXPERT_FFN else layout.tp
        quantum = stored(rule, scheme).quantum(1)
        if rule.shape[1] % parts or rule.shape[1] // parts % quantum:
            return rule, rule.shape[1] // parts, quantum
    return None


def _plain(ours: str) -> str:
    return ours.replace("layers.{layer}.", "").replace(".{expert}", "").removesuffix(".weight")


def divisors(number: int) -> tuple[int, ...]:
    small = [value for value in range(1, int(number**0.5) + 1) if number % value == 0]
    return tuple(sorted({*small, *(number // value for value in small)}))


def nearest_divisors(number: int, wanted: int, how_many: int = 3) -> tuple[int, ...]:
    return tuple(sorted(sorted(divisors(number), key=lambda value: abs(value - wanted))[:how_many]))


def layouts(
    spec: ModelSpec,
    engine: EngineProfile,
    num_devices: int,
    pins: dict[str, int],
    *,
    replicas: int | None = None,
    idle: bool = False,
) -> Iterator[Layout]:
    """Every layout of the devices that respects the pins.

    `replicas`: upper limit of dp. `idle`: also degrees that do not divide the devices, leaving some of them idle.
    """
    for tp in _tp_choices(spec, num_devices, pins, idle):
        for pp in _pp_choices(spec, num_devices, tp, pins, idle):
            most = num_devices // (tp * pp)
            if not most:
                continue
            dp = pins.get("dp", min(most, replicas) if replicas else most)
            for ep in [pins["ep"]] if "ep" in pins else _ep_choices(spec, engine, tp, dp):
                if tp * pp * dp <= num_devices:
                    yield Layout(tp=tp, pp=pp, ep=ep, dp=dp)


def _tp_choices(spec: ModelSpec, num_devices: int, pins: dict[str, int], idle: bool) -> list[int]:
    if "tp" in pins:
        return [pins["tp"]]
    if any(isinstance(layer.mixer, Convolution) for layer in spec.layers):
        return [1]  # supports pipeline parallelism only
    most = min(num_devices, spec.attention.num_heads, 64)
    return [tp for tp in (range(1, most + 1) if idle else divisors(num_devices)) if tp <= most]


def _pp_choices(spec: ModelSpec, num_devices: int, tp: int, pins: dict[str, int], idle: bool) -> list[int]:
    if "pp" in pins:
        return [pins["pp"]] if pins["pp"] <= spec.num_layers else []
    most = min(num_devices // tp, spec.num_layers)
    return [pp for pp in range(1, most + 1) if idle or num_devices % (tp * pp) == 0]


def _ep_choices(spec: ModelSpec, engine: EngineProfile, tp: int, dp: int) -> list[int]:
    if spec.experts is None:
        return [1]
    widest = tp * dp if engine.experts_over_replicas else tp
    return [ep for ep in sorted({1, widest}) if spec.experts.num_experts % ep == 0]


def check_pins(spec: ModelSpec, num_devices: int, pins: dict[str, int]) -> None:
    """The product of the pinned degrees must match the devices; ep is not a factor."""
    for name, value in pins.items():
        if value < 1:
            raise Impossible(f"{name} {value}: a degree must be at least 1")
    factors = {name: pins[name] for name in ("tp", "pp", "dp") if name in pins}
    product = 1
    for value in factors.values():
        product *= value
    text = " x ".join(f"{name} {value}" for name, value in factors.items())
    if len(factors) == 3 and product != num_devices:
        raise Impossible(f"{text} = {product}, but there are {num_devices} devices (ep is not a factor: it reuses the tp ranks)")
    if factors and (product > num_devices or num_devices % product):
        raise Impossible(
            f"{text} does not divide {num_devices} devices; use divisors of it: {', '.join(map(str, divisors(num_devices)))}"
        )

"""Hit rates of the expert cache by policy, with routing that was recorded from the bundled mixture and with routing that was drawn.

    python bench/offload/policies.py [--tokens 400]

Policies differ in the half-life of an expert's uses (runtime/offload/experts/cache.py): near zero it is least recently used, infinite it is least
frequently used. `fixed` keeps the experts that were used most in the first half of the trace and never changes them; `best` knows the
future (Belady), which bounds every policy. One sequence decodes; a step needs the experts of its token, layer after layer. The first
quarter of a trace fills the cache and is not counted. The last rows: some experts of each layer have a fixed home in memory and the rest of it is a
cache of the others, so many slots for each expert that memory has no room for (core/tiers/below.py).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from math import inf

import numpy as np

from windlass.runtime.offload.experts.cache import ExpertCache

Trace = list[list[np.ndarray]]
"""Steps; in each, the experts of every layer."""
HALF_LIVES = {
    "recency": 1e-3,
    "half-life 4": 4.0,
    "half-life 16": 16.0,
    "half-life 64": 64.0,
    "half-life 256": 256.0,
    "frequency": 1e9,
}
SHARES = (0.125, 0.25, 0.5, 0.75)
CACHED_PER_MISSING = (0.25, 1.0, 2.0, 4.0)


def recorded(tokens: int) -> tuple[Trace, int]:
    """Routing of the bundled model while it answers its own tasks, and its number of experts."""
    import torch

    from windlass.core.launch import Launch
    from windlass.core.request import GREEDY
    from windlass.model.bundled.models import find_bundled
    from windlass.model.bundled.tasks import held_out
    from windlass.runtime.engine.load import build, make_engine
    from windlass.runtime.engine.protocol import Submit
    from windlass.runtime.nn.moe import MixtureOfExperts
    from windlass.runtime.weights.text.files import model_text

    folder = find_bundled("tiny-glm")
    assert folder is not None
    launch = Launch(model=str(folder), device="cpu", max_sequences=1)
    decoder = build(launch, "cpu").decoder
    layers = [module for module in decoder.modules() if isinstance(module, MixtureOfExperts)]
    steps: Trace = []

    def hook(number: int):
        def note(logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            if ids.shape[0] == 1:  # decoding
                if number == 0:
                    steps.append([])
                if steps:
                    steps[-1].append(np.unique(ids.numpy()))
            return weights

        return note

    for number, layer in enumerate(layers):
        layer.routing_hook = hook(number)
    engine = make_engine(launch, decoder, "cpu", record=False)
    text = model_text(folder)
    for number, problem in enumerate(held_out(12)):
        prompt = f"[gMASK]<sop><|user|>{problem.prompt}<|assistant|>"
        engine.submit(
            Submit(
                id=number,
                token_ids=text.tokenizer.encode(prompt),
                sampling=GREEDY,
                max_tokens=48,
                stop_token_ids=list(text.stop_ids),
            )
        )
        while engine.has_work:
            engine.step()
        if len(steps) >= tokens:
            return steps[:tokens], layers[0].moe.num_experts
    return steps, layers[0].moe.num_experts


def drawn(tokens: int, layers: int, experts: int, active: int, hot: float, share: float, seed: int = 0) -> Trace:
    """`share` of the picks fall on `hot` of the experts of a layer, which ones differ by layer; picks of a token are distinct."""
    source = np.random.default_rng(seed)
    chances = np.full(experts, (1 - share) / (experts * (1 - hot)))
    chances[: int(experts * hot)] = share / (experts * hot)
    orders = [source.permutation(experts) for _ in range(layers)]
    chances /= chances.sum()
    return [[np.sort(order[source.choice(experts, active, replace=False, p=chances)]) for order in orders] for _ in range(tokens)]


def hit_rate(trace: Trace, experts: int, slots: int, half_life: float) -> float:
    cache = ExpertCache(len(trace[0]), experts, slots, half_life)
    before = 0, 0
    for number, step in enumerate(trace):
        if number == len(trace) // 4:
            before = cache.counts.hits, cache.counts.misses
        for layer, chosen in enumerate(step):
            cache.fetch(layer, chosen.astype(np.int64))
    hits, misses = cache.counts.hits - before[0], cache.counts.misses - before[1]
    return hits / (hits + misses)


def homes_rate(trace: Trace, experts: int, slots: int, per_missing: float) -> float:
    """With homes for whichever experts: their numbers say nothing of their use."""
    layers = len(trace[0])
    cached = min(slots, max(int(per_missing * (layers * experts - slots)), 16))
    homes = (slots - cached) // layers
    cache = ExpertCache(layers, experts, slots - homes * layers, 16.0)
    at_home = before = hits = 0
    for number, step in enumerate(trace):
        if number == len(trace) // 4:
            before, at_home = cache.counts.misses, 0
            hits = cache.counts.hits
        for layer, chosen in enumerate(step):
            at_home += int((chosen >= experts - homes).sum())
            cache.fetch(layer, chosen[chosen < experts - homes].astype(np.int64))
    misses = cache.counts.misses - before
    return 1 - misses / (misses + cache.counts.hits - hits + at_home)


def fixed_rate(trace: Trace, experts: int, slots: int) -> float:
    counts = np.zeros(len(trace[0]) * experts)
    half = len(trace) // 2
    for step in trace[:half]:
        for layer, chosen in enumerate(step):
            counts[layer * experts + chosen] += 1
    kept = np.zeros(len(counts), dtype=bool)
    kept[np.argsort(-counts, kind="stable")[:slots]] = True
    found = [kept[layer * experts + chosen] for step in trace[half:] for layer, chosen in enumerate(step)]
    return float(np.concatenate(found).mean())


def best_rate(trace: Trace, experts: int, slots: int) -> float:
    """Evicts what is needed last."""
    order = [layer * experts + int(one) for step in trace for layer, chosen in enumerate(step) for one in chosen]
    uses: dict[int, list[int]] = defaultdict(list)
    for at in range(len(order) - 1, -1, -1):
        uses[order[at]].append(at)
    cached: dict[int, float] = {}
    start, hits, counted = len(order) // 4, 0, 0
    for at, key in enumerate(order):
        uses[key].pop()
        if at >= start:
            counted += 1
            hits += key in cached
        if key not in cached and len(cached) >= slots:
            del cached[max(cached, key=cached.__getitem__)]
        cached[key] = uses[key][-1] if uses[key] else inf
    return hits / counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=400)
    options = parser.parse_args()
    trained, num_experts = recorded(options.tokens)
    traces = {
        f"tiny-glm, recorded ({len(trained)} tokens, {len(trained[0])} layers of {num_experts})": (trained, num_experts),
        "80 % of picks on 25 % of experts (8 of 128, 12 layers)": (drawn(options.tokens, 12, 128, 8, 0.25, 0.8), 128),
        "even (8 of 128, 12 layers)": (drawn(options.tokens, 12, 128, 8, 0.25, 0.25), 128),
    }
    for name, (trace, experts) in traces.items():
        print(
            f"\n{name}\n| policy | "
            + " | ".join(f"{share:.1%} in memory" for share in SHARES)
            + " |\n|---|"
            + "---|" * len(SHARES)
        )
        slots = [max(int(share * experts * len(trace[0])), 1) for share in SHARES]
        rows = {policy: [hit_rate(trace, experts, count, half) for count in slots] for policy, half in HALF_LIVES.items()}
        for share in CACHED_PER_MISSING:
            rows[f"homes, {share:g} cached per missing"] = [homes_rate(trace, experts, count, share) for count in slots]
        rows["fixed"] = [fixed_rate(trace, experts, count) for count in slots]
        rows["best"] = [best_rate(trace, experts, count) for count in slots]
        for policy, rates in rows.items():
            print(f"| {policy} | " + " | ".join(f"{rate:.1%}" for rate in rates) + " |")


if __name__ == "__main__":
    main()

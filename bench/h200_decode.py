"""What the decode kernels reach at the shape of a 106B mixture (46 layers, hidden 4,096, 128 experts of 1,408, 4 bits in groups of 128).

`kernels` times each alone in a CUDA graph over buffers that are never in cache, `many` the ways that 2 to 64 rows can go; `stack` times whole
steps over 46 layers of distinct weights, `prefill` a prompt.
Run: PYTHONPATH=src python bench/h200_decode.py kernels stack --batch 1,8,32,64
"""

# ruff: noqa: B023 (every closure is called before its loop goes on)

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.kernels.cuda import attention, driver, experts, layout, linear, norm, route

HIDDEN, HEADS, KV_HEADS, DIM, WIDTH, EXPERTS, ACTIVE, VOCABULARY, LAYERS = 4096, 96, 8, 128, 1408, 128, 8, 151552, 46
EPS = 1e-5
QKV = (HEADS + 2 * KV_HEADS) * DIM
LIMIT = 4.46e12


def random_tiles(num_matrices: int, rows: int, inputs: int, group: int = 128, *, paired: bool = False) -> layout.Tiles:
    tiles = layout.empty(num_matrices, rows, inputs, group, paired=paired)
    tiles.data.view(torch.int64).random_()
    # Uniform codes have a mean of -0.5; signs at random take it away, or all rows would become alike and choose the same experts.
    scales = torch.full((*tiles.data.shape[:3], 16 * (128 // group)), 1 / 4.6 / inputs**0.5, dtype=torch.bfloat16, device="cuda")
    scales *= torch.randint(0, 2, scales.shape, device="cuda", dtype=torch.int8) * 2 - 1
    tiles.data[..., 1024:] = scales.view(torch.uint8)
    return tiles


def graph_seconds(calls: Sequence[Callable[[], object]], repeat: int = 20) -> float:
    """Mean over one replay of all calls, the median of `repeat`."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        times = []
        for _ in range(repeat):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1e3)
    return sorted(times)[len(times) // 2] / len(calls)


def report(name: str, num_bytes: float, make: Callable[[int], Callable[[], object]], copies: int) -> None:
    calls = [make(i % copies) for i in range(max(copies, 24) // copies * copies)]
    row = []
    for dependent in (False, True):
        driver.DEPENDENT = dependent
        row.append(graph_seconds(calls))
    driver.DEPENDENT = True
    alone, chained = row
    rates = f"{num_bytes / alone / 1e12:5.2f} TB/s | {chained * 1e6:7.2f} us {num_bytes / chained / 1e12:5.2f} TB/s"
    rates += f" {num_bytes / chained / LIMIT:4.0%}"
    print(f"{name:34s} {num_bytes / 1e6:8.1f} MB | {alone * 1e6:7.2f} us {rates}", flush=True)


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


def halves(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def kernels(batches: Sequence[int]) -> None:
    print(
        f"{'kernel':34s} {'bytes':>11s} | one after the other          | dependent launch: time, rate, share of {LIMIT / 1e12:.2f} TB/s"
    )
    copies = 16
    gain, h = torch.ones(HIDDEN, device="cuda"), floats(HIDDEN)
    for name, rows, inputs in (("qkv", QKV, HIDDEN), ("out", HIDDEN, HEADS * DIM)):
        sets = [random_tiles(1, rows, inputs) for _ in range(copies)]
        size, bias = sets[0].data.numel(), floats(rows)
        for choice, budget in (((1, 16), 136), ((2, 8), 136), ((2, 8), 86), ((4, 4), 86)) if 1 in batches else ():
            out, x = torch.empty(rows, device="cuda"), halves(inputs)
            if name == "qkv":
                report(
                    f"{name} 1 row, {choice} {budget}",
                    size,
                    lambda i: lambda: linear.linear_one(h, sets[i], out, bias=bias, norm=gain, eps=EPS, choice=choice),
                    copies,
                )
            else:
                report(
                    f"{name} 1 row, {choice} {budget}",
                    size,
                    lambda i: lambda: linear.linear_one(x, sets[i], out, residual=out, choice=choice, budget=budget * 1024),
                    copies,
                )
        for batch in batches:
            x = halves(batch, inputs)
            if batch <= 8:
                parts = torch.empty(linear.num_slices(sets[0]), batch, rows, device="cuda")
                for budget, unit, choice in ((112, 1, (16, 1)), (112, 2, (16, 2)), (220, 2, (16, 2)), (220, 2, (16, 4))):
                    report(
                        f"{name} {batch} rows, eight {budget} {unit} {choice}",
                        size,
                        lambda i: lambda: linear.linear_eight(x, sets[i], parts, unit=unit, choice=choice, budget=budget * 1024),
                        copies,
                    )
            slices = linear.wide_slices(sets[0])
            parts = torch.empty(slices, batch, rows, device="cuda")
            report(
                f"{name} {batch} rows, wide {slices} slices",
                size,
                lambda i: lambda: linear.linear_wide(x, sets[i], parts, slices=slices),
                copies,
            )
    router = floats(EXPERTS, HIDDEN) / 64
    if 1 in batches:
        logits = torch.empty(EXPERTS, device="cuda")
        report("router 1 row", router.numel() * 4, lambda i: lambda: route.router_one(h, gain, router, logits, EPS), 1)
    copies = 3
    first = [random_tiles(EXPERTS + 1, 2 * WIDTH, HIDDEN, paired=True) for _ in range(copies)]
    second = [random_tiles(EXPERTS + 1, HIDDEN, WIDTH) for _ in range(copies)]
    expert_bytes = first[0].data[0].numel(), second[0].data[0].numel()
    for batch in batches:
        chosen = route.routes(batch, EXPERTS, ACTIVE, 1)
        if batch == 1:
            # Other experts each time, or the cache would hold them.
            many = [floats(EXPERTS) for _ in range(12)]
            spaces = [route.routes(1, EXPERTS, ACTIVE, 1) for _ in range(12)]
            act, out = torch.empty(9, WIDTH, device="cuda", dtype=torch.bfloat16), torch.empty(HIDDEN, device="cuda")
            for choice in ((1, 16), (2, 8), (4, 4)):
                report(
                    f"gate+up 1 row, {choice}",
                    9 * expert_bytes[0],
                    lambda i: (
                        lambda: experts.gate_up_one(h, gain, first[i % 3], act, many[i], None, spaces[i], eps=EPS, choice=choice)
                    ),
                    12,
                )
            for choice in ((1, 11), (2, 11)):
                report(
                    f"down 1 row, {choice}",
                    9 * expert_bytes[1],
                    lambda i: lambda: experts.down_one(act, second[i % 3], out, spaces[i], residual=out, choice=choice),
                    12,
                )
        x = halves(batch, HIDDEN)
        logits = torch.empty(batch, EXPERTS, device="cuda")
        report(f"router {batch} rows", router.numel() * 4, lambda i: lambda: route.router_many(x, router, logits), 1)
        report(f"route {batch} rows", logits.numel() * 4, lambda i: lambda: route.route_many(logits, None, chosen), 1)
        torch.cuda.synchronize()
        items, distinct = chosen.num_items[0].item(), chosen.ids.unique().numel()
        act = torch.empty(batch * 9, WIDTH, device="cuda", dtype=torch.bfloat16)
        parts = torch.empty(batch * 9, HIDDEN, device="cuda")
        name = f"{batch} rows, {distinct} experts, {items} items"
        for resident, unit, choice in (
            (1, 2, (16, 2)),
            (1, 2, (16, 4)),
            (1, 4, (16, 2)),
            (1, 4, (16, 4)),
            (2, 1, (8, 2)),
            (2, 2, (8, 2)),
            (2, 1, (16, 1)),
        ):
            report(
                f"gate+up {name} {resident} {unit} {choice}",
                (distinct + 1) * expert_bytes[0],
                lambda i: lambda: experts.gate_up_many(x, first[i], act, chosen, unit=unit, resident=resident, choice=choice),
                copies,
            )
        for resident, unit, choice in (
            (1, 4, (11, 4)),
            (1, 8, (11, 2)),
            (1, 8, (11, 4)),
            (2, 2, (11, 2)),
            (2, 4, (11, 2)),
            (2, 4, (11, 1)),
        ):
            report(
                f"down {name} {resident} {unit} {choice}",
                (distinct + 1) * expert_bytes[1],
                lambda i: lambda: experts.down_many(act, second[i], parts, chosen, unit=unit, resident=resident, choice=choice),
                copies,
            )
        h_many, out = floats(batch, HIDDEN), torch.empty(batch, HIDDEN, device="cuda", dtype=torch.bfloat16)
        view = parts.view(batch, 9, HIDDEN)
        report(
            f"add+norm {batch} rows",
            parts.numel() * 4,
            lambda i: lambda: norm.add_norm(h_many, gain, out, EPS, parts=view, weights=chosen.weights),
            1,
        )
    head = halves(VOCABULARY, HIDDEN)
    logits = torch.empty(VOCABULARY, device="cuda")
    report("head bf16 1 row", head.numel() * 2, lambda i: lambda: norm.head_one(h, gain, head, logits, EPS), 1)
    for batch in batches:
        x, result = halves(batch, HIDDEN), torch.empty(batch, VOCABULARY, device="cuda", dtype=torch.bfloat16)
        report(f"head bf16 {batch} rows (cuBLAS)", head.numel() * 2, lambda i: lambda: torch.mm(x, head.T, out=result), 1)
    small = random_tiles(1, VOCABULARY, HIDDEN)
    report("head int4 1 row", small.data.numel(), lambda i: lambda: linear.linear_one(h, small, logits, norm=gain, eps=EPS), 1)


def many(batches: Sequence[int]) -> None:
    """What 2 to 64 rows can be multiplied by: bf16 or integers, items of 8 or 16 rows, units of 16 to 64 rows, one block or two."""
    for name, rows, inputs in (("qkv", QKV, HIDDEN), ("out", HIDDEN, HEADS * DIM)):
        sets = [random_tiles(1, rows, inputs) for _ in range(12)]
        for batch in batches:
            many_linear(f"{name} {batch}", sets, halves(batch, inputs))
        del sets
    first = [random_tiles(EXPERTS + 1, 2 * WIDTH, HIDDEN, paired=True) for _ in range(3)]
    second = [random_tiles(EXPERTS + 1, HIDDEN, WIDTH) for _ in range(3)]
    for batch in batches:
        many_experts(batch, first, second)


def many_linear(name: str, sets: list[layout.Tiles], x: Tensor) -> None:
    batch, size, rows = x.shape[0], sets[0].data.numel(), sets[0].rows
    parts = torch.empty(linear.num_slices(sets[0]), batch, rows, device="cuda")
    ways = ((112, 2, (16, 2)), (220, 2, (16, 2)), (220, 4, (16, 2)), (220, 2, (16, 4))) if batch <= 8 else ()
    for product in (0, 1):
        for budget, unit, choice in ways:
            report(
                f"{name} {('bf16', 'int')[product]} {budget} {unit} {choice}",
                size,
                lambda i: (
                    lambda: linear.linear_eight(
                        x, sets[i], parts, unit=unit, choice=choice, budget=budget * 1024, product=product
                    )
                ),
                len(sets),
            )
    for unit, choice in ((2, (8, 2)), (2, (8, 4)), (4, (8, 4)), (2, (16, 2))) if 8 < batch <= 32 else ():
        report(
            f"{name} int 16 rows {unit} {choice}",
            size,
            lambda i: lambda: linear.linear_eight(x, sets[i], parts, unit=unit, choice=choice, product=1, columns=2),
            len(sets),
        )
    if batch > 8:
        fit = next(n for n in (16, 32, 64) if batch <= n)
        slices = linear.wide_slices(sets[0])
        sums = torch.empty(slices, batch, rows, device="cuda")
        for unit in dict.fromkeys(((64, 1, 1), (fit, 1, 1), (fit, 2, 2))):
            report(
                f"{name} wide {slices} slices {unit}",
                size,
                lambda i: lambda: linear.linear_wide(x, sets[i], sums, slices=slices, unit=unit),
                len(sets),
            )


def many_experts(batch: int, first: list[layout.Tiles], second: list[layout.Tiles]) -> None:
    logits = floats(batch, EXPERTS)
    eight = route.route_many(logits, None, route.routes(batch, EXPERTS, ACTIVE, 1))
    sixteen = route.dispatch(eight.ids, eight.weights, EXPERTS, 1, 16)
    distinct = eight.ids.unique().numel()
    x, act = halves(batch, HIDDEN), halves(batch * 9, WIDTH)
    parts = torch.empty(batch * 9, HIDDEN, device="cuda")
    ways = [(eight, product, unit, choice) for product in (0, 1) for unit, choice in ((4, (16, 2)), (4, (16, 4)), (4, (8, 4)))]
    ways += [(eight, 1, 8, (8, 4)), (eight, 1, 2, (16, 2))]
    if batch > 8:
        ways += [(sixteen, 1, unit, choice) for unit, choice in ((4, (8, 2)), (4, (8, 4)), (2, (16, 2)), (2, (16, 1)))]
    for items, product, unit, choice in ways:
        count = f"{items.num_items[0].item()} of {items.item_rows.shape[1]}"
        report(
            f"gate+up {batch}, {count} {('bf16', 'int')[product]} {unit} {choice}",
            (distinct + 1) * first[0].data[0].numel(),
            lambda i: lambda: experts.gate_up_many(x, first[i], act, items, unit=unit, choice=choice, product=product),
            3,
        )
    ways = [(eight, product, unit, choice) for product in (0, 1) for unit, choice in ((8, (11, 2)), (8, (11, 4)), (4, (11, 4)))]
    if batch > 8:
        ways += [(sixteen, 1, 4, choice) for choice in ((11, 2), (11, 4), (11, 1))]
    for items, product, unit, choice in ways:
        count = f"{items.num_items[0].item()} of {items.item_rows.shape[1]}"
        report(
            f"down {batch}, {count} {('bf16', 'int')[product]} {unit} {choice}",
            (distinct + 1) * second[0].data[0].numel(),
            lambda i: lambda: experts.down_many(act, second[i], parts, items, unit=unit, choice=choice, product=product),
            3,
        )


def attention_table(cases: Sequence[tuple[int, int]]) -> None:
    for batch, tokens in cases:
        cache = Caches(batch, tokens, layers=1 if tokens * batch > 20000 else 8)
        qkv, out = halves(batch, QKV), torch.empty(batch, HEADS * DIM, device="cuda", dtype=torch.bfloat16)
        size = batch * tokens * KV_HEADS * DIM * 4
        for shape in ((4, 1), (4, 2), (8, 1), (8, 2)):
            for splits in sorted({attention.launch_shape(tokens, batch, KV_HEADS)[0] * n for n in (1, 2)}):
                if splits > attention.MAX_SPLITS:
                    continue
                cache.splits, cache.shape = splits, shape
                cache.space = attention.workspace(batch, HEADS, KV_HEADS, splits)
                report(
                    f"attention {batch} x {tokens}, {splits} splits {shape}",
                    size,
                    lambda i: lambda: cache.attend(i, qkv, out),
                    len(cache.keys),
                )


class Caches:
    """Sequences of `tokens` tokens, the last of them new; pages in random order."""

    def __init__(self, batch: int, tokens: int, layers: int = LAYERS) -> None:
        pages = -(-tokens // 16)
        self.blocks = torch.randperm(batch * pages, device="cuda").to(torch.int32).view(batch, pages)
        self.lengths = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")
        self.positions = self.lengths - 1
        self.slots = self.blocks[:, -1] * 16 + (tokens - 1) % 16
        angles = torch.arange(tokens, device="cuda")[:, None] / 10000 ** (torch.arange(32, device="cuda") / 32)
        self.table = torch.stack((angles.cos(), angles.sin()), dim=1).contiguous()
        self.keys = [halves(batch * pages, KV_HEADS, DIM, 16) for _ in range(layers)]
        self.values = [halves(batch * pages, KV_HEADS, 16, DIM) for _ in range(layers)]
        self.splits, self.shape = attention.launch_shape(tokens, batch, KV_HEADS)
        self.space = attention.workspace(batch, HEADS, KV_HEADS, self.splits)

    def attend(self, layer: int, qkv: Tensor, out: Tensor) -> Tensor:
        return attention.decode_attention(
            qkv, self.table, self.positions, self.slots, self.lengths, self.blocks, self.keys[layer], self.values[layer], out,
            self.space, scale=DIM**-0.5, splits=self.splits, shape=self.shape,
        )  # fmt: skip


@dataclass
class Layer:
    norm: Tensor
    qkv: layout.Tiles
    bias: Tensor
    out: layout.Tiles
    norm_after: Tensor
    router: Tensor
    router_parts: Tensor
    """bf16 [3 * experts, hidden]: three numbers whose sum is the fp32 weight"""
    correction: Tensor
    gate_up: layout.Tiles
    down: layout.Tiles


def split_bf16(x: Tensor) -> Tensor:
    parts = []
    for _ in range(3):
        parts.append(x.to(torch.bfloat16))
        x = x - parts[-1].float()
    return torch.cat(parts)


def random_layer() -> Layer:
    router = floats(EXPERTS, HIDDEN) / 64
    return Layer(
        norm=torch.ones(HIDDEN, device="cuda"),
        qkv=random_tiles(1, QKV, HIDDEN),
        bias=floats(QKV) * 0.01,
        out=random_tiles(1, HIDDEN, HEADS * DIM),
        norm_after=torch.ones(HIDDEN, device="cuda"),
        router=router,
        router_parts=split_bf16(router),
        correction=torch.zeros(EXPERTS, device="cuda"),
        gate_up=random_tiles(EXPERTS + 1, 2 * WIDTH, HIDDEN, paired=True),
        down=random_tiles(EXPERTS + 1, HIDDEN, WIDTH),
    )


class Stack:
    """A whole decode step: from the embedding's rows in `start` to logits."""

    def __init__(self, layers: list[Layer], head: Tensor, batch: int, tokens: int) -> None:
        self.layers, self.head, self.batch = layers, head, batch
        self.options = {"skip": "", "budgets": "LXLX", "attend": (8, 2), "choice": (None, None)}
        self.caches = Caches(batch, tokens, len(layers))
        self.gain = torch.ones(HIDDEN, device="cuda")
        self.start, self.h = floats(batch, HIDDEN), floats(batch, HIDDEN)
        self.x = halves(batch, HIDDEN)
        self.qkv, self.attended = halves(batch, QKV), halves(batch, HEADS * DIM)
        self.router_logits = floats(batch, EXPERTS)
        self.routes = [route.routes(batch, EXPERTS, ACTIVE, 1) for _ in layers]
        self.act, self.parts = halves(batch * 9, WIDTH), floats(batch * 9, HIDDEN)
        slices = linear.num_slices(layers[0].out) if batch <= 8 else linear.wide_slices(layers[0].out)
        self.slices = floats(slices, batch, HIDDEN)
        self.logits = floats(batch, VOCABULARY) if batch == 1 else halves(batch, VOCABULARY)

    def step(self) -> None:
        self.h.copy_(self.start)
        (self.one if self.batch == 1 else self.many)()

    def one(self) -> None:
        h, skip = self.h[0], self.options["skip"]
        budgets = [{"S": 86, "M": 112, "L": 136, "X": 200}[size] * 1024 for size in self.options["budgets"]]
        self.caches.shape = self.options["attend"]
        for number, layer in enumerate(self.layers):
            routes = self.routes[number]
            if skip != "qkv":
                linear.linear_one(h, layer.qkv, self.qkv[0], bias=layer.bias, norm=layer.norm, eps=EPS, budget=budgets[0])
            if skip != "attention":
                self.caches.attend(number, self.qkv, self.attended)
            if skip != "out":
                linear.linear_one(self.attended[0], layer.out, h, residual=h, budget=budgets[1], choice=self.options["choice"][0])
            if skip != "router":
                route.router_one(h, layer.norm_after, layer.router, self.router_logits[0], EPS)
            if skip != "gate+up":
                experts.gate_up_one(
                    h, layer.norm_after, layer.gate_up, self.act, self.router_logits[0], layer.correction, routes, eps=EPS,
                    budget=budgets[2],
                )  # fmt: skip
            if skip != "down":
                experts.down_one(self.act, layer.down, h, routes, residual=h, budget=budgets[3], choice=self.options["choice"][1])
        if skip != "head":
            norm.head_one(h, self.gain, self.head, self.logits[0], EPS)

    def many(self) -> None:
        parts, weights = None, None
        product = linear.linear_eight if self.batch <= 8 else functools.partial(linear.linear_wide, slices=self.slices.shape[0])
        qkv_product = linear.linear_eight if self.batch <= 8 else linear.linear_wide
        for number, layer in enumerate(self.layers):
            routes = self.routes[number]
            norm.add_norm(self.h, layer.norm, self.x, EPS, parts=parts, weights=weights)
            qkv_product(self.x, layer.qkv, self.qkv, bias=layer.bias)
            self.caches.attend(number, self.qkv, self.attended)
            product(self.attended, layer.out, self.slices)
            norm.add_norm(self.h, layer.norm_after, self.x, EPS, parts=self.slices)
            route.router_many(self.x, layer.router, self.router_logits)
            route.route_many(self.router_logits, layer.correction, routes)
            experts.gate_up_many(self.x, layer.gate_up, self.act, routes)
            experts.down_many(self.act, layer.down, self.parts, routes)
            parts, weights = self.parts.view(self.batch, 9, HIDDEN), routes.weights
        norm.add_norm(self.h, self.gain, self.x, EPS, parts=parts, weights=weights)
        torch.mm(self.x, self.head.T, out=self.logits)


def stack(batches: Sequence[int], num_layers: int, tokens: int) -> None:
    start = time.time()
    layers = [random_layer() for _ in range(num_layers)]
    head = halves(VOCABULARY, HIDDEN) / 64
    torch.cuda.synchronize()
    print(f"{num_layers} layers made in {time.time() - start:.1f} s, {torch.cuda.memory_allocated() / 2**30:.1f} GiB", flush=True)
    for batch in batches:
        model = Stack(layers, head, batch, tokens)
        for name, options in VARIANTS.items() if batch == 1 else ((way, {"way": way}) for way in WAYS):
            if "way" in options:
                linear.PRODUCT, linear.PAIRS = WAYS[options["way"]]
            for dependent in (True,) if options and batch == 1 else (False, True):
                driver.DEPENDENT = dependent
                model.options.update(
                    {
                        "skip": "",
                        "budgets": "LXLX",
                        "attend": (8, 2),
                        "choice": (None, None),
                        **options,
                    }
                )
                measure(model, f"{name} dependent {dependent!s:5s}", tokens)
        model.options.update({"skip": "", "budgets": "LXLX", "attend": (8, 2), "choice": (None, None)})
        for dependent in (False, True):
            driver.DEPENDENT = dependent
            results = []
            for _ in range(4):
                model.step()
                torch.cuda.synchronize()
                results.append(model.logits.clone())
            graph_seconds([model.step], repeat=3)
            results.append(model.logits.clone())
            print(
                f"          dependent {dependent}: equal to the first run: {[torch.equal(results[0], r) for r in results[1:]]}",
                flush=True,
            )
        del model


WAYS = {
    "bf16": (0, False),
    "integers": (1, False),
    "integers, pairs of blocks": (1, True),
}
"""Of many rows: `linear.PRODUCT` and `linear.PAIRS`; the checks that follow are of the last."""

VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "attention of 4 warps": {"attend": (4, 2)},
    "down 2 teams": {"choice": (None, (2, 11))},
    "budgets SLSL": {"budgets": "SLSL"},
    "budgets MMMM": {"budgets": "MMMM"},
    "budgets XXXX": {"budgets": "XXXX"},
    "budgets LLLL": {"budgets": "LLLL"},
    "budgets LSLS": {"budgets": "LSLS"},
    **{f"without {name}": {"skip": name} for name in ("qkv", "attention", "out", "router", "gate+up", "down", "head")},
}


def timeline(num_layers: int, tokens: int) -> None:
    """When blocks of one step's kernels start, may read, have read x and end, in us."""
    layers = [random_layer() for _ in range(num_layers)]
    buffer = torch.zeros(300000, dtype=torch.int64, device="cuda")
    driver.DEFINES["TRACE_AT"] = buffer.data_ptr()
    model = Stack(layers, halves(VOCABULARY, HIDDEN) / 64, 1, tokens)
    model.options.update({})
    names = {1: "qkv", 0: "out", 3: "gate+up", 4: "down", 8: "attention", 9: "router"}
    for dependent in (False, True):
        driver.DEPENDENT = dependent
        graph_seconds([model.step], repeat=3)
        buffer.zero_()
        graph_seconds([model.step], repeat=1)
        count = int(buffer[0].item())
        events = buffer[1 : 1 + 2 * count].view(-1, 2).tolist()
        events.sort()
        half = events[len(events) // 2 :]
        start = next(time for time, what in half if what >> 32 == 1 and (what >> 16 & 0xFFFF) == 1)
        table: dict[tuple[int, int, int], list[int]] = {}
        lap = {}
        for time_ns, what in half:
            key = (what >> 32, what >> 16 & 0xFFFF, what & 0xFFFF)
            lap[key] = lap.get(key, -1) + 1
            table.setdefault((lap[key], key[0], key[1]), []).append(time_ns - start)
        print(
            f"dependent {dependent}: {count} events; kernel: start | may read | x ready | end, first and last of the blocks seen (us)"
        )
        for turn in range(1, 3):
            for kind in (1, 8, 0, 9, 3, 4):
                cells = [table.get((turn, kind, event), []) for event in range(4)]
                print(
                    f"  {turn} {names[kind]:10s}",
                    *(f"{min(c) / 1e3:8.2f} {max(c) / 1e3:8.2f} |" if c else f"{'':17s} |" for c in cells),
                )
    driver.DEFINES.clear()


def measure(model: Stack, name: str, tokens: int) -> None:
    layers, head, batch = model.layers, model.head, model.batch
    seconds = graph_seconds([model.step], repeat=30)
    distinct = sum(r.ids.unique().numel() for r in model.routes) / len(layers)
    per_layer = layers[0].qkv.data.numel() + layers[0].out.data.numel() + EXPERTS * HIDDEN * 4
    per_layer += (distinct + 1) * (layers[0].gate_up.data[0].numel() + layers[0].down.data[0].numel())
    size = per_layer * len(layers) + head.numel() * 2 + batch * tokens * KV_HEADS * DIM * 4 * len(layers)
    finite = bool(model.logits.isfinite().all())
    print(
        f"batch {batch:3d} {name:40s} {seconds * 1e3:8.3f} ms {batch / seconds:8.1f} tokens/s | {size / 1e9:6.2f} GB "
        f"{size / seconds / 1e12:5.2f} TB/s {size / seconds / LIMIT:4.0%} | {distinct:.1f} experts a layer, finite {finite}",
        flush=True,
    )


class Prefill:
    """A prompt of `rows` tokens through all layers; logits of the last row."""

    def __init__(self, layers: list[Layer], head: Tensor, rows: int) -> None:
        self.layers, self.head, self.rows = layers, head, rows
        self.start, self.h = floats(rows, HIDDEN), floats(rows, HIDDEN)
        self.gain = torch.ones(HIDDEN, device="cuda")
        self.x, self.qkv = halves(rows, HIDDEN), halves(rows, QKV)
        self.projected, self.act, self.parts = halves(1, rows, HIDDEN), halves(rows * 9, WIDTH), halves(rows * 9, HIDDEN)
        self.caches = Caches(1, rows, 1)
        self.positions = torch.arange(rows, dtype=torch.int32, device="cuda")
        self.slots = (
            (self.caches.blocks[0].long()[:, None] * 16 + torch.arange(16, device="cuda")).flatten()[:rows].to(torch.int32)
        )
        self.skip, self.size = "", 160

    def attend(self) -> Tensor:
        attention.rotate_store(
            self.qkv, self.caches.table, self.positions, self.slots, self.caches.keys[0], self.caches.values[0], KV_HEADS
        )
        q, k, v = (
            part.view(1, self.rows, -1, DIM).transpose(1, 2)
            for part in self.qkv.split((HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM), dim=1)
        )
        with torch.nn.attention.sdpa_kernel(
            [torch.nn.attention.SDPBackend.CUDNN_ATTENTION, torch.nn.attention.SDPBackend.FLASH_ATTENTION], set_priority=True
        ):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(self.rows, HEADS * DIM)

    def step(self) -> None:
        self.h.copy_(self.start)
        parts, weights = None, None
        attended = self.qkv[:, : HEADS * DIM].contiguous()
        for layer in self.layers:
            norm.add_norm(self.h, layer.norm, self.x, EPS, parts=parts, weights=weights)
            if self.skip != "qkv":
                linear.linear_wide(self.x, layer.qkv, self.qkv, bias=layer.bias)
            if self.skip != "attention":
                attended = self.attend()
            if self.skip != "out":
                linear.linear_wide(attended, layer.out, self.projected[0])
            norm.add_norm(self.h, layer.norm_after, self.x, EPS, parts=self.projected)
            if self.skip != "routing" or weights is None:
                logits = torch.mm(self.x, layer.router_parts.T, out_dtype=torch.float32).view(self.rows, 3, EXPERTS).sum(1)
                ids, weights = route.choose_many(logits, layer.correction, ACTIVE)
                chosen = route.dispatch(ids, weights, EXPERTS, 1, self.size)
            if self.skip != "gate+up":
                experts.gate_up_wide(self.x, layer.gate_up, self.act, chosen)
            if self.skip != "down":
                experts.down_wide(self.act, layer.down, self.parts, chosen)
            parts = self.parts.view(self.rows, 9, HIDDEN)
        norm.add_norm(self.h, self.gain, self.x, EPS, parts=parts, weights=weights)
        self.logits = self.x[-1:] @ self.head.T


def prefill_kernels(rows: int) -> None:
    """One after the other, even routing."""
    layer, flops = random_layer(), 2.0 * rows
    gain, h, x = torch.ones(HIDDEN, device="cuda"), floats(rows, HIDDEN), halves(rows, HIDDEN)
    qkv, wide, projected = halves(rows, QKV), halves(rows, HEADS * DIM), halves(rows, HIDDEN)
    act, parts = halves(rows * 9, WIDTH), halves(rows * 9, HIDDEN)
    driver.DEPENDENT = False

    def show(name: str, call: Callable[[], object], work: float = 0.0) -> None:
        seconds = graph_seconds([call] * 4, repeat=5)
        print(
            f"prefill {rows}: {name:40s} {seconds * 1e6:9.1f} us" + (f" {work / seconds / 1e12:6.0f} TFLOP/s" if work else ""),
            flush=True,
        )

    for unit in ((128, 1, 1), (128, 2, 1), (144, 2, 1), (160, 2, 1), (256, 1, 1)):
        show(
            f"qkv, unit {unit}",
            lambda: linear.linear_wide(x, layer.qkv, qkv, bias=layer.bias, unit=unit),
            flops * QKV * HIDDEN,
        )
        show(
            f"out, unit {unit}",
            lambda: linear.linear_wide(wide, layer.out, projected, unit=unit),
            flops * HEADS * DIM * HIDDEN,
        )
    show("router product", lambda: torch.mm(x, layer.router_parts.T, out_dtype=torch.float32).view(rows, 3, EXPERTS).sum(1))
    logits = torch.mm(x, layer.router_parts.T, out_dtype=torch.float32).view(rows, 3, EXPERTS).sum(1)
    show("choose", lambda: route.choose_many(logits, layer.correction, ACTIVE))
    ids, weights = route.choose_many(logits, layer.correction, ACTIVE)
    for size in (64, 128, 144, 160):
        show(f"dispatch, items of {size}", lambda: route.dispatch(ids, weights, EXPERTS, 1, size))
        chosen = route.dispatch(ids, weights, EXPERTS, 1, size)
        note = f"{chosen.num_items.item()} items of {size}"
        show(f"gate+up, {note}", lambda: experts.gate_up_wide(x, layer.gate_up, act, chosen), flops * 9 * 2 * WIDTH * HIDDEN)
        show(f"down, {note}", lambda: experts.down_wide(act, layer.down, parts, chosen), flops * 9 * WIDTH * HIDDEN)
    view = parts.view(rows, 9, HIDDEN)
    show("add+norm of 9 parts", lambda: norm.add_norm(h, gain, x, EPS, parts=view, weights=weights))
    model = Prefill([layer], halves(16, HIDDEN), rows)
    show("rotate, store, attention", model.attend)
    show("rotate, store", lambda: attention.rotate_store(
        model.qkv, model.caches.table, model.positions, model.slots, model.caches.keys[0], model.caches.values[0], KV_HEADS
    ))  # fmt: skip
    codes = torch.randint(-(1 << 31), 1 << 31, (EXPERTS, 2 * WIDTH, HIDDEN // 8), device="cuda").to(torch.int32)
    scales = torch.rand(EXPERTS, 2 * WIDTH, HIDDEN // 128, device="cuda").to(torch.bfloat16)
    packed = layout.empty(EXPERTS, 2 * WIDTH, HIDDEN, 128, paired=True)
    seconds = graph_seconds([lambda: layout.repack(codes, scales, paired=True, out=packed)], repeat=5)
    moved = codes.numel() * 4 + scales.numel() * 2 + packed.data.numel()
    print(
        f"repack of {packed.data.numel() / 1e6:.0f} MB: {seconds * 1e6:.0f} us, {moved / seconds / 1e12:.2f} TB/s read and written",
        flush=True,
    )
    driver.DEPENDENT = True


def prefill(num_layers: int, rows: int) -> None:
    prefill_kernels(rows)
    layers = [random_layer() for _ in range(num_layers)]
    model = Prefill(layers, halves(VOCABULARY, HIDDEN) / 64, rows)
    matrices = {"qkv": QKV * HIDDEN, "out": HIDDEN * HEADS * DIM, "gate+up": 9 * 2 * WIDTH * HIDDEN, "down": 9 * WIDTH * HIDDEN}
    for model.size in (128, 144, 160):
        seconds = graph_seconds([model.step], repeat=5)
        print(f"prefill {rows} tokens, items of {model.size}: {seconds * 1e3:8.2f} ms {rows / seconds:8.0f} tokens/s", flush=True)
    whole = 0.0
    for skip in ("", "qkv", "attention", "out", "routing", "gate+up", "down"):
        model.skip = skip
        seconds = graph_seconds([model.step], repeat=5)
        whole = whole or seconds
        note = f"{rows / seconds:8.0f} tokens/s, finite {bool(model.logits.isfinite().all())}"
        if skip:
            each = (whole - seconds) / num_layers
            note = f"{each * 1e6:8.1f} us a layer" + (
                f", {2 * rows * matrices[skip] / each / 1e12:.0f} TFLOP/s" if skip in matrices else ""
            )
        print(
            f"prefill {rows} tokens, {num_layers} layers, without {skip or 'nothing':10s} {seconds * 1e3:8.2f} ms {note}",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", choices=("kernels", "many", "attention", "stack", "timeline", "prefill"))
    parser.add_argument("--batch", default="1,8,32,64")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    batches = [int(b) for b in options.batch.split(",")]
    print(torch.cuda.get_device_name(), torch.__version__, torch.version.cuda)
    if "kernels" in options.what:
        kernels(batches)
    if "many" in options.what:
        many([b for b in batches if b > 1])
    if "attention" in options.what:
        attention_table(((1, 200), (8, 200), (64, 200), (1, 32768), (8, 32768), (1, 131072), (3, 131072)))
    if "timeline" in options.what:
        timeline(8, options.tokens)
    if "prefill" in options.what:
        prefill(options.layers, 2048)
    if "stack" in options.what:
        stack(batches, options.layers, options.tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())

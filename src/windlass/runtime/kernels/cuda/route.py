"""Routing on the device: logits, top-k, and a list of items (an expert and up to 8 rows that chose it)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from windlass.runtime.kernels.cuda import driver

ITEM_ROWS = 8
MAX_ROWS = 64


@dataclass(frozen=True)
class Routes:
    """Buffers for the routing of up to `rows` rows; place = row * (active + shared) + slot, the shared expert has the last slot."""

    ids: Tensor
    """int32 [rows, active]"""
    weights: Tensor
    """fp32 [rows, active]"""
    num_items: Tensor
    """int32 [2]: the number of items, and a counter that is zero between launches"""
    item_expert: Tensor
    """int32 [items]"""
    item_rows: Tensor
    """int32 [items, 8 or more], -1 for none"""
    item_places: Tensor
    num_experts: int
    num_active: int
    num_shared: int
    softmax: bool = False
    """Weights are a softmax over the chosen experts rather than normalized sigmoids."""

    def first(self, rows: int) -> Routes:
        """For the first rows."""
        return replace(self, ids=self.ids[:rows], weights=self.weights[:rows])


def routes(
    rows: int,
    num_experts: int,
    num_active: int,
    num_shared: int = 0,
    device: torch.device | str = "cuda",
    *,
    softmax: bool = False,
    item_rows: int = ITEM_ROWS,
) -> Routes:
    # Each expert's last item may be partly empty.
    items = min(rows * num_active, num_experts + rows * num_active // item_rows) + num_shared * -(-rows // item_rows)
    integers = {"dtype": torch.int32, "device": device}
    return Routes(
        ids=torch.zeros(rows, num_active, **integers),
        weights=torch.zeros(rows, num_active, dtype=torch.float32, device=device),
        num_items=torch.zeros(2, **integers),
        item_expert=torch.zeros(items, **integers),
        item_rows=torch.full((items, item_rows), -1, **integers),
        item_places=torch.full((items, item_rows), -1, **integers),
        num_experts=num_experts,
        num_active=num_active,
        num_shared=num_shared,
        softmax=softmax,
    )


def all_rows(rows: int, item_rows: int, device: torch.device | str = "cuda") -> Routes:
    """Routes for a dense feed-forward: every row to the single (shared) expert."""
    items = -(-rows // item_rows)
    numbers = torch.arange(items * item_rows, dtype=torch.int32, device=device)
    places = torch.where(numbers < rows, numbers, -1).view(items, item_rows)
    return Routes(
        ids=torch.zeros(rows, 0, dtype=torch.int32, device=device),
        weights=torch.zeros(rows, 0, dtype=torch.float32, device=device),
        num_items=torch.tensor([items, 0], dtype=torch.int32, device=device),
        item_expert=torch.zeros(items, dtype=torch.int32, device=device),
        item_rows=places,
        item_places=places,
        num_experts=0,
        num_active=0,
        num_shared=1,
    )


@dataclass(frozen=True)
class Guess:
    """What the next layer's router chooses with the rows of this layer: probably what it will choose with its own."""

    router: Tensor
    """fp32 [experts, inputs]"""
    correction: Tensor | None
    scale: Tensor
    """fp32 [inputs]: the next norm's weight, divided by this one's."""
    logits: Tensor
    """fp32 [rows, experts]"""
    ids: Tensor
    """int32 [rows, active], the most likely first"""


def parts_of(inputs: int) -> int:
    return -(-inputs // 1024)


def router_few(x: Tensor, norm: Tensor, weight: Tensor, logits: Tensor, eps: float) -> Tensor:
    """Logits fp32 [rows, experts] of norm(x), x fp32 [1 to 4 rows, inputs], weight fp32 [experts, inputs]; inputs in fours, at most 8,192."""
    assert x.is_contiguous()
    run = driver.kernel("small.cu", "PPPPIf", "router_few", packed=False, PARTS=parts_of(weight.shape[1]), ROUTED=x.shape[0])
    run((weight.shape[0],), 256, x, norm, weight, logits, weight.shape[1], eps)
    return logits


def router_many(x: Tensor, weight: Tensor, logits: Tensor, guess: Guess | None = None) -> Tensor:
    """Logits fp32 [rows, experts] of x bf16 [rows, inputs]; inputs in fours, at most 8,192, experts likewise in fours. `guess`: its logits too."""
    run = driver.kernel("small.cu", "PPPPPPIII", "router_many", packed=False, PARTS=parts_of(weight.shape[1]))
    following = (None, None, None) if guess is None else (guess.router, guess.scale, guess.logits)
    grid = weight.shape[0] // 4 * (1 if guess is None else 2), -(-x.shape[0] // 8)
    run(grid, 256, x, weight, logits, *following, weight.shape[1], x.shape[0], weight.shape[0])
    return logits


def route_many(
    logits: Tensor, correction: Tensor | None, into: Routes, routed_scale: float = 1.0, guess: Guess | None = None
) -> Routes:
    """`guess`: its ids too."""
    run = driver.kernel(
        "small.cu", "PPPPPPPPPPPIIIf", "route_many", packed=False, EXPERTS=into.num_experts, SOFTMAX=int(into.softmax),
        ITEM=into.item_rows.shape[1],
    )  # fmt: skip
    rows = logits.shape[0]
    assert rows <= MAX_ROWS
    following = (None, None, None) if guess is None else (guess.logits, guess.correction, guess.ids)
    run(
        (-(-rows // 4) * (1 if guess is None else 2),), 128, logits, correction, into.ids, into.weights, into.num_items, into.item_expert,
        into.item_rows, into.item_places, *following, rows, into.num_active, into.num_shared, routed_scale,
    )  # fmt: skip
    return into


def choose_many(
    logits: Tensor, correction: Tensor | None, num_active: int, routed_scale: float = 1.0, *, softmax: bool = False
) -> tuple[Tensor, Tensor]:
    """Top-k ids and weights alone, any number of rows. logits fp32 [rows, experts], or [rows, parts, experts], which are added up."""
    rows, num_experts = logits.shape[0], logits.shape[-1]
    parts = {} if logits.dim() == 2 else {"LOGIT_PARTS": logits.shape[1]}
    ids = torch.empty(rows, num_active, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, num_active, dtype=torch.float32, device=logits.device)
    run = driver.kernel("small.cu", "PPPPIIf", "choose_many", packed=False, EXPERTS=num_experts, SOFTMAX=int(softmax), **parts)
    run((-(-rows // 4),), 128, logits, correction, ids, weights, rows, num_active, routed_scale)
    return ids, weights


def dispatch(ids: Tensor, weights: Tensor, num_experts: int, num_shared: int, item_rows: int = 128) -> Routes:
    """Items of up to `item_rows` rows, for any number of rows, without synchronization: buffers have their maximum size."""
    rows, active = ids.shape
    most = num_experts + num_shared + rows * (active + num_shared) // item_rows
    integers = {"dtype": torch.int32, "device": ids.device}
    result = Routes(
        ids=ids, weights=weights, num_items=torch.empty(1, **integers), item_expert=torch.empty(most, **integers),
        item_rows=torch.empty(most, item_rows, **integers), item_places=torch.empty(most, item_rows, **integers),
        num_experts=num_experts, num_active=active, num_shared=num_shared,
    )  # fmt: skip
    if not ids.is_cuda:
        return _dispatch_reference(result)
    counts = torch.empty(num_experts, **integers)
    count = driver.kernel("small.cu", "PPI", "dispatch_count", packed=False, EXPERTS=num_experts)
    count((num_experts,), 1024, ids, counts, rows * active)
    fill = driver.kernel("small.cu", "PPPPPPIIII", "dispatch_fill", packed=False, EXPERTS=num_experts)
    fill(
        (num_experts + num_shared,), 1024, ids, counts, result.num_items, result.item_expert, result.item_rows, result.item_places,
        rows, active, num_shared, item_rows,
    )  # fmt: skip
    return result


def _dispatch_reference(result: Routes) -> Routes:
    items = items_reference(result.ids, result.num_experts, result.num_shared, result.item_rows.shape[1])
    result.num_items.fill_(len(items))
    result.item_rows.fill_(-1)
    result.item_places.fill_(-1)
    for number, (expert, rows, places) in enumerate(items):
        result.item_expert[number] = expert
        result.item_rows[number, : len(rows)] = torch.tensor(rows, dtype=torch.int32)
        result.item_places[number, : len(places)] = torch.tensor(places, dtype=torch.int32)
    return result


def items_reference(
    ids: Tensor, num_experts: int, num_shared: int, item_rows: int = ITEM_ROWS
) -> list[tuple[int, list[int], list[int]]]:
    """(expert, rows, places) in order; an expert's rows are shared out evenly, in sixteens."""
    rows, active = ids.shape
    chosen: list[list[tuple[int, int]]] = [[] for _ in range(num_experts)]
    for row, experts in enumerate(ids.tolist()):
        for slot, expert in enumerate(experts):
            chosen[expert].append((row, row * (active + num_shared) + slot))
    chosen += [[(row, row * (active + 1) + active) for row in range(rows)]] * num_shared
    return [
        (expert, [row for row, _ in some], [place for _, place in some])
        for expert, pairs in enumerate(chosen)
        for some in _shared_out(pairs, rows_of_each(len(pairs), item_rows))
    ]


def _shared_out(pairs: list[tuple[int, int]], each: int) -> list[list[tuple[int, int]]]:
    return [pairs[i : i + each] for i in range(0, len(pairs), each)]


def rows_of_each(count: int, item_rows: int) -> int:
    """Of as few items as hold `count` rows: kernels compute as many columns as an item has, in sixteens."""
    num_items = max(1, -(-count // item_rows))
    return max(1, min(item_rows, -(-count // (num_items * 16)) * 16))

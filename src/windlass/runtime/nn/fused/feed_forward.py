"""Feed-forwards of the fused decoder: dense (as a single shared expert) and routed."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from windlass.core import integer_units
from windlass.core.model import Scoring
from windlass.core.tiers.guesses import GUESS_ROWS
from windlass.runtime.kernels.cuda import experts, int8, layout, linear, route
from windlass.runtime.kernels.cuda import norm as norms
from windlass.runtime.kernels.cuda.int8 import RoundedRows
from windlass.runtime.kernels.cuda.layout import Tiles
from windlass.runtime.kernels.cuda.route import MAX_ROWS, Guess, Routes
from windlass.runtime.kernels.cuda.sliced import SlicedTiles
from windlass.runtime.kernels.cuda.tiered import TieredTiles
from windlass.runtime.nn.feed_forward import FeedForward
from windlass.runtime.nn.moe import MixtureOfExperts

WIDE_ITEMS = (64, 128, 160)
"""Rows of an expert per item: larger items reuse weights better, but have more padding."""

FEW_ROWS = 8
FEW_ROWS_OF_EACH = 12
"""Up to this many rows per expert on average, weights are streamed for eight rows at a time; beyond, items of 64 rows are faster."""
FEW_ROWS_BEFORE_INT8 = 6
"""The same where integer products of more rows follow."""
ITEM_ROWS = 8
"""Rows per item for more than a few rows."""

MAX_STREAMED_BLOCKS = 64
"""Of inputs: the registers of a thread block hold no more for eight rows."""

Parts = tuple[Tensor, Tensor | None]
"""Partial sums for the residual stream, and their weights: see norm.add_norm."""


def _halves(*shape: int, device: torch.device) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device=device)


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """fp32 [rows, outputs] of bf16 inputs, accumulated and returned in fp32."""
    if not x.is_cuda:  # PyTorch has no out_dtype there
        return x.float() @ weight.float().T
    return torch.mm(x, weight.T, out_dtype=torch.float32)


class DenseFeed:
    def __init__(self, gate_up: Tiles, down: Tiles) -> None:
        self.gate_up, self.down = gate_up, down
        self._padded: Tensor | None = None
        if down.width > down.inputs:  # the padding stays zero
            self._padded = torch.zeros(MAX_ROWS, down.width, dtype=torch.bfloat16, device=down.data.device)

    def takes_few(self, rows: int) -> bool:
        return experts.takes_few(self.gate_up, self.down, self._all_rows(rows, 8), rows)

    def few(self, h: Tensor, norm: Tensor, eps: float) -> None:
        """h fp32 [1 to 4 rows, hidden], in place."""
        rows = h.shape[0]
        routes, act = self._all_rows(rows, 8), self._act(rows)
        experts.gate_up_few(h, norm, self.gate_up, act, h, None, routes, eps=eps)
        experts.down_few(act, self.down, h, routes, residual=h)

    def several(self, x: Tensor, h: Tensor) -> Parts:
        del h
        rows = x.shape[0]
        act = self._act(rows)
        if rows <= 8 and self.gate_up.tile_blocks <= MAX_STREAMED_BLOCKS:
            experts.gate_up_many(x, self.gate_up, act, self._all_rows(rows, 8))
        else:
            size = next(size for size in (16, 32, 64) if rows <= size)
            experts.gate_up_wide(x, self.gate_up, act, self._all_rows(rows, size), deep=2 if size <= 32 else 1)
        return linear.linear_parts(act, self.down), None

    def wide(self, x: Tensor) -> Parts:
        rows = x.shape[0]
        act = torch.zeros(rows, self.down.width, dtype=torch.bfloat16, device=x.device)
        experts.gate_up_wide(x, self.gate_up, act, self._all_rows(rows, 128))
        return linear.linear_parts(act, self.down), None

    def wide_int8(self, x: Tensor, rounded: RoundedRows) -> Parts:
        act = int8.dense_gate_up_rounded(rounded, self.gate_up, self.down.width)
        return int8.linear_parts(act, self.down), None

    def _act(self, rows: int) -> Tensor:
        if self._padded is not None:
            return self._padded[:rows]
        return _halves(rows, self.down.width, device=self.down.data.device)

    def _all_rows(self, rows: int, item_rows: int) -> Routes:
        return _all_rows(rows, item_rows, self.down.data.device)

    def int8_kernels(self, counts: range) -> set[int8.Variant]:
        """That steps of so many rows need."""
        return {int8.gate_up_variant(rows, self.gate_up) for rows in counts} | {
            int8.parts_variant(rows, self.down) for rows in counts
        }


@functools.cache
def _all_rows(rows: int, item_rows: int, device: torch.device) -> Routes:
    """Kept, for all layers: making them copies numbers to the device, which a graph cannot."""
    return route.all_rows(rows, item_rows, device)


class RoutedFeed:
    def __init__(self, feed: MixtureOfExperts) -> None:
        moe = feed.moe
        self.num_experts, self.num_active, self.scale = moe.num_experts, moe.num_active, moe.router.scale
        self.num_shared = int(feed.shared is not None)
        self.softmax = moe.router.scoring is not Scoring.SIGMOID
        self.correction: Tensor | None = feed.correction
        self.router: Tensor = feed.router.weight
        self._router_parts = _three_parts(self.router)
        self.gate_up, self.down = self._matrices(feed)
        self.slots = self.num_active + self.num_shared
        self.routes = self._routes(FEW_ROWS, 8)
        self._more_routes = self._routes(MAX_ROWS, ITEM_ROWS)

    def _routes(self, rows: int, item_rows: int) -> Routes:
        return route.routes(
            rows,
            self.num_experts,
            self.num_active,
            self.num_shared,
            self.router.device,
            softmax=self.softmax,
            item_rows=item_rows,
        )

    def _matrices(self, feed: MixtureOfExperts) -> tuple[Tiles, Tiles]:
        return _with_shared(feed)

    def chosen(self, rows: int) -> Routes:
        """The routes of the last step of up to 64 rows."""
        return (self.routes if rows <= FEW_ROWS else self._more_routes).first(rows)

    @property
    def width(self) -> int:
        return self.gate_up.rows // 2

    def takes_few(self, rows: int) -> bool:
        return experts.takes_few(self.gate_up, self.down, self.routes, rows)

    def few(self, h: Tensor, norm: Tensor, eps: float) -> None:
        """h fp32 [1 to 4 rows, hidden], in place."""
        rows, device = h.shape[0], h.device
        logits = torch.empty(rows, self.num_experts, dtype=torch.float32, device=device)
        act = _halves(rows, self.slots * self.width, device=device)
        route.router_few(h, norm, self.router, logits, eps)
        experts.gate_up_few(h, norm, self.gate_up, act, logits, self.correction, self.routes, eps=eps, routed_scale=self.scale)
        experts.down_few(act, self.down, h, self.routes, residual=h)

    def several(self, x: Tensor, h: Tensor) -> Parts:
        del h
        return self._products(x, self._routed(x))

    def _routed(self, x: Tensor, guess: Guess | None = None) -> Routes:
        rows = x.shape[0]
        routes = self.chosen(rows)
        logits = torch.empty(rows, self.num_experts, dtype=torch.float32, device=x.device)
        return route.route_many(route.router_many(x, self.router, logits, guess), self.correction, routes, self.scale, guess)

    def _products(self, x: Tensor, routes: Routes) -> Parts:
        rows, device = x.shape[0], x.device
        act = _halves(rows * self.slots, self.width, device=device)
        parts = torch.empty(rows * self.slots, x.shape[1], dtype=torch.float32, device=device)
        experts.gate_up_many(x, self.gate_up, act, routes)
        experts.down_many(act, self.down, parts, routes)
        return parts.view(rows, self.slots, -1), routes.weights

    def wide(self, x: Tensor) -> Parts:
        rows, device = x.shape[0], x.device
        mean = self._mean_rows(rows)
        if mean <= FEW_ROWS_OF_EACH:
            return self._streamed(x)
        # So that most experts need one item: the mean plus two standard deviations.
        size = next((size for size in WIDE_ITEMS if size >= mean + 2 * mean**0.5), WIDE_ITEMS[-1])
        routes = self._dispatched(x, size)
        act = _halves(rows * self.slots, self.width, device=device)
        parts = _halves(rows * self.slots, x.shape[1], device=device)
        experts.gate_up_wide(x, self.gate_up, act, routes)
        experts.down_wide(act, self.down, parts, routes)
        return parts.view(rows, self.slots, -1), routes.weights

    def wide_int8(self, x: Tensor, rounded: RoundedRows) -> Parts:
        rows, device = x.shape[0], x.device
        mean = self._mean_rows(rows)
        if mean <= FEW_ROWS_BEFORE_INT8:
            return self._streamed(x)
        routes = self._dispatched(x, integer_units.item_rows(mean))
        act = int8.gate_up_rounded(rounded, self.gate_up, self.down.width, rows * self.slots, routes)
        parts = _halves(rows * self.slots, x.shape[1], device=device)
        int8.down(act, self.down, parts, routes)
        return parts.view(rows, self.slots, -1), routes.weights

    def int8_kernels(self, counts: range) -> set[int8.Variant]:
        """That steps of so many rows need."""
        sizes = {integer_units.item_rows(self._mean_rows(rows)) for rows in counts}
        return {variant for rows in sizes for variant in int8.item_variants(rows, self.gate_up, self.down)}

    def _streamed(self, x: Tensor) -> Parts:
        """Where experts have few rows each, reading weights takes the time."""
        return self._products(x, self._dispatched(x, FEW_ROWS))

    def _dispatched(self, x: Tensor, item_rows: int) -> Routes:
        logits = wide_product(x, self._router_parts).view(x.shape[0], 3, -1)
        ids, weights = route.choose_many(logits, self.correction, self.num_active, self.scale, softmax=self.softmax)
        return route.dispatch(ids, weights, self.num_experts, self.num_shared, item_rows)

    def _mean_rows(self, rows: int) -> float:
        """Of an expert."""
        return rows * self.num_active / self.num_experts


class OffloadedFeed(RoutedFeed):
    """Some experts lie in host memory (runtime/kernels/cuda/tiered.py)."""

    guesses = True
    """Whether layers guess what the next one will choose; off, to measure what that gains."""

    def __init__(self, feed: MixtureOfExperts) -> None:
        super().__init__(feed)
        self._following: OffloadedFeed | None = None
        self._is_foreseen = False
        self._scale: Tensor | None = None
        self.next_correction: Tensor | None = None
        """For the guess: that of the layer behind."""

    def foresee(self, following: OffloadedFeed, norms: tuple[Tensor, Tensor]) -> None:
        """Guesses for the layer behind from now on. `norms`: weights of the norms before the experts, of this layer and of that one. What enters them
        hardly changes from layer to layer; that it has this layer's weight is undone."""
        if (following.num_experts, following.num_active, following.softmax) != (self.num_experts, self.num_active, self.softmax):
            return
        old, new = (weight.float() for weight in norms)
        self._scale = torch.where(old == 0, 0.0, new / old).contiguous()
        self._following, following._is_foreseen = following, True
        self.next_correction = following.correction
        self._guessed = torch.zeros(GUESS_ROWS, self.num_active, dtype=torch.int32, device=self.router.device)

    def _matrices(self, feed: MixtureOfExperts) -> tuple[Tiles, Tiles]:
        tiers = feed.gate_up
        assert isinstance(tiers, TieredTiles)
        self._tiers = tiers
        if feed.shared is not None:
            shared = tiers.set_shared(feed.shared.up.weight, feed.shared.down.weight)
            feed.shared.up.weight, feed.shared.down.weight = shared
        return tiers.slots.gate_up, tiers.slots.down

    def takes_few(self, rows: int) -> bool:
        return rows == 1

    def few(self, h: Tensor, norm: Tensor, eps: float) -> None:
        x = _halves(*h.shape, device=h.device)
        norms.add_norm(h, norm, x, eps)
        parts, weights = self.several(x, h)
        norms.add_norm(h, norm, None, eps, parts=parts, weights=weights)

    def several(self, x: Tensor, h: Tensor) -> Parts:
        tiers, rows = self._tiers, x.shape[0]
        following = self._following if self._guesses_for(rows) else None
        foreseen = self._is_foreseen and self._guesses_for(rows)
        guess = self._guess(rows, following)
        routes = self._routed(x, guess)
        if following is None or guess is None:
            tiers.place(x, routes, foreseen=foreseen)
            tiers.fetch(foreseen=foreseen)
        else:
            tiers.place(x, routes, following._tiers, guess.ids, foreseen=foreseen)
            tiers.fetch(foreseen=foreseen)
            following._tiers.fetch_ahead(rows)
        parts = self._products(x, routes)
        tiers.collect(h)
        return parts

    def _guesses_for(self, rows: int) -> bool:
        return self.guesses and self._tiers.most_guesses(rows) > 0

    def _guess(self, rows: int, following: OffloadedFeed | None) -> Guess | None:
        if following is None or self._scale is None:
            return None
        logits = torch.empty(rows, self.num_experts, dtype=torch.float32, device=self._scale.device)
        return Guess(following.router, self.next_correction, self._scale, logits, self._guessed[:rows])

    def wide(self, x: Tensor) -> Parts:
        with self._tiers.whole():
            return super().wide(x)

    def wide_int8(self, x: Tensor, rounded: RoundedRows) -> Parts:
        with self._tiers.whole():
            return super().wide_int8(x, rounded)

    def abandon(self) -> None:
        """After a step that did not come to its end."""
        self._tiers.abandon()

    def _dispatched(self, x: Tensor, item_rows: int) -> Routes:
        return self._tiers.use_whole(super()._dispatched(x, item_rows))


class SlicedFeed:
    """Dense; a part of it lies in host memory (runtime/kernels/cuda/sliced.py)."""

    def __init__(self, tiles: SlicedTiles) -> None:
        self._tiles, self._staged = tiles, tiles.staged
        self._device = None if tiles.gate_up is None or tiles.down is None else DenseFeed(tiles.gate_up, tiles.down)
        self._fetched: dict[int, DenseFeed] = {}
        self.gate_up, self.down = self._staged.buffer(tiles.layer, 0)

    def takes_few(self, rows: int) -> bool:
        return rows == 1

    def few(self, h: Tensor, norm: Tensor, eps: float) -> None:
        x = _halves(*h.shape, device=h.device)
        norms.add_norm(h, norm, x, eps)
        norms.add_norm(h, norm, None, eps, parts=self.several(x, h)[0])

    def several(self, x: Tensor, h: Tensor) -> Parts:
        share = self._tiles.shares.of(x.shape[0])
        if self._device is None:  # something has to begin the sum
            share = min(share, self._staged.num_slices - 1)
        if share:
            self._tiles.ask(x, share)
        parts = self._added(share, lambda feed: feed.several(x, h)[0])
        if share:
            self._tiles.collect(h)
        return parts

    def wide(self, x: Tensor) -> Parts:
        return self._added(0, lambda feed: feed.wide(x)[0])

    def wide_int8(self, x: Tensor, rounded: RoundedRows) -> Parts:
        return self._added(0, lambda feed: feed.wide_int8(x, rounded)[0])

    def abandon(self) -> None:
        """After a step that did not come to its end."""
        self._tiles.abandon()

    def int8_kernels(self, counts: range) -> set[int8.Variant]:
        """That steps of so many rows need."""
        fetched = self._of_fetched(0) if self._staged.num_slices else None
        feeds = [feed for feed in (self._device, fetched) if feed is not None]
        return {variant for feed in feeds for variant in feed.int8_kernels(counts)}

    def _added(self, first: int, product: Callable[[DenseFeed], Tensor]) -> Parts:
        """Of what is on the device, and of the slices from `first` on. The device's own part comes first: copies run meanwhile."""
        layer, parts = self._tiles.layer, list[Tensor]()
        if self._device is not None:
            parts.append(product(self._device))
        if first < self._staged.num_slices:
            self._staged.before(layer, first)
            parts.append(product(self._of_fetched(first)))
            self._staged.after(layer, first)
        if len({part.dtype for part in parts}) > 1:
            parts = [part.float() for part in parts]
        return torch.cat(parts) if len(parts) > 1 else parts[0], None

    def _of_fetched(self, first: int) -> DenseFeed:
        if first not in self._fetched:
            self._fetched[first] = DenseFeed(*self._staged.buffer(self._tiles.layer, first))
        return self._fetched[first]


def routed_feed(feed: MixtureOfExperts) -> RoutedFeed:
    return OffloadedFeed(feed) if isinstance(feed.gate_up, TieredTiles) else RoutedFeed(feed)


def dense_feed(feed: FeedForward) -> DenseFeed | SlicedFeed:
    weight = feed.up.weight
    return SlicedFeed(weight) if isinstance(weight, SlicedTiles) else DenseFeed(weight, feed.down.weight)


def _three_parts(router: Tensor) -> Tensor:
    """bf16 [3 * experts, hidden]: three parts whose sum is the fp32 weight, to about 24 bits."""
    parts: list[Tensor] = []
    rest = router.float()
    for _ in range(3):
        parts.append(rest.to(torch.bfloat16))
        rest = rest - parts[-1].float()
    return torch.cat(parts)


def _with_shared(feed: MixtureOfExperts) -> tuple[Tiles, Tiles]:
    """The shared expert after the routed ones, in one tensor; the modules keep views of it."""
    if feed.shared is None:
        return feed.gate_up, feed.down
    joined: list[Tiles] = []
    for routed, shared in ((feed.gate_up, feed.shared.up), (feed.down, feed.shared.down)):
        whole = layout.joined(routed, shared.weight)
        joined.append(whole)
        shared.weight = whole.part(routed.num_matrices, routed.num_matrices + 1)
    feed.gate_up, feed.down = (whole.part(0, whole.num_matrices - 1) for whole in joined)
    return joined[0], joined[1]

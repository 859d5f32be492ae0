"""The decoder's forward pass in a few kernels per layer (runtime/kernels/cuda): the same weights and the same mathematics as runtime/nn/decoder.py.

The residual stream is fp32; what a half layer adds to it stays in partial sums until the next norm reads them, which saves a pass over
memory. 1 to 4 rows: norms are fused into the products; up to 64 rows (8 of a dense model): weights are streamed; more: activations are rounded to 8
bits and multiplied in integers where weights have groups of 128, else in bf16. core/fused.py says which models are supported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from windlass.core.fused import HEAD_DIM, ONE_ROW_WIDTH
from windlass.core.model import ModelSpec
from windlass.runtime.kernels.cuda import attention as heads
from windlass.runtime.kernels.cuda import driver, int8, linear, norm
from windlass.runtime.kernels.cuda.layout import Tiles, fits_tiles, quantized
from windlass.runtime.kernels.step import BLOCK_TOKENS, KvCache, Step
from windlass.runtime.nn.fused.feed_forward import OffloadedFeed, RoutedFeed, SlicedFeed, wide_product
from windlass.runtime.nn.fused.layer import MAX_ROWS, AttentionLaunch, FusedLayer, ResidualStream
from windlass.runtime.nn.fused.prompts import BEGUN_ROWS, attend_whole, continued, planned_rows, prompts_of
from windlass.runtime.nn.parallel.shard import ModelShard
from windlass.runtime.nn.parallel.stage import Stage

DEPENDENT_ROWS = 1024
"""Up to this many rows, programmatic dependent launch: 10 % faster at one row, 2 % at 64; 0.5 % slower at 2,048."""
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


class FusableDecoder(Protocol):
    """What the fused pass uses of a decoder."""

    spec: ModelSpec
    layers: Any
    table: Any
    norm: Any
    head: Any
    shard: ModelShard
    stage: Stage


class FusedDecoder:
    """Of a whole model, or of a pipeline stage: rows travel between stages as the fp32 residual stream."""

    dtype = logit_dtype = torch.float32

    def __init__(self, decoder: FusableDecoder) -> None:
        spec = self.spec = decoder.spec
        self.decoder, self.eps = decoder, spec.norm.eps
        self.layers = [FusedLayer(layer, spec.norm.eps) for layer in decoder.layers]
        for layer, following in pairwise(self.layers):
            if isinstance(layer.feed, OffloadedFeed) and isinstance(following.feed, OffloadedFeed):
                layer.feed.foresee(following.feed, (layer.ffn_norm, following.ffn_norm))
        self.num_heads, self.num_kv_heads = self.layers[0].mixer.num_heads, self.layers[0].mixer.num_kv_heads
        device = self.layers[0].qkv.data.device
        # Counters of finished splits; zero between launches.
        self._arrived = torch.zeros(1024 * self.num_kv_heads, dtype=torch.int32, device=device)
        self._most_few = max(
            rows for rows in range(1, linear.FEW_ROWS + 1) if all(layer.takes_few(rows) for layer in self.layers)
        )
        self.hidden: Tensor | None = None
        """bf16 [rows, hidden] for the rows of a step after the final norm, which the MTP layer reads; None: nobody does."""
        self.draft_head: Tiles | None = None
        """The head in 4 bits, for drafts: a draft that is wrong for it costs time, not the answer."""

    def __call__(self, step: Step, caches: Sequence[KvCache]) -> Tensor:
        """fp32 [logit rows, vocabulary] of a step without padding; empty on other ranks than the first."""
        try:
            return self._passed(step, caches)
        except BaseException:
            with suppress(Exception):  # after an error of the device this fails too; the first one counts
                self._abandon()
            raise

    def _passed(self, step: Step, caches: Sequence[KvCache]) -> Tensor:
        rows = step.tokens.shape[0]
        h = self._entering(step)
        with driver.dependent_launches(rows <= DEPENDENT_ROWS), sdpa_kernel(BACKENDS, set_priority=True):
            space = self.space(step)
            way = self._few if self.takes_few(rows, h.shape[1], space) else self._more
            return self._leaving(way(ResidualStream(h, self.eps), space, caches), step)

    def takes_few(self, rows: int, width: int, space: AttentionLaunch) -> bool:
        """Whether a step of so many rows takes the kernels of 1 to 4 rows."""
        most = self._most_few if space.prompts is None else 1
        return rows <= most and width <= ONE_ROW_WIDTH

    def _abandon(self) -> None:
        """Weights that were on their way to the device, and the CPU's answers, would come into the next step."""
        feeds = [layer.feed for layer in self.layers if isinstance(layer.feed, OffloadedFeed | SlicedFeed)]
        if feeds and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            feeds[0].abandon()  # which all layers share

    # --- stages (runtime/nn/parallel/stage.py)

    def embedded(self, step: Step) -> Tensor:
        """fp32 [rows, hidden]"""
        return torch.nn.functional.embedding(step.tokens, self.decoder.table).float()

    def step_logits(self, hidden: Tensor, step: Step) -> Tensor:
        return self._logits(ResidualStream(hidden, self.eps), step)

    def _entering(self, step: Step) -> Tensor:
        if driver.is_collecting() and not self.decoder.shard.is_first:  # no other rank takes part
            return torch.zeros(step.tokens.shape[0], self.spec.hidden_size, device=step.tokens.device)
        return self.decoder.stage.enter(self, step)

    def _leaving(self, stream: ResidualStream, step: Step) -> Tensor:
        if self.decoder.shard.is_last:
            logits = self._logits(stream, step)
            return logits if driver.is_collecting() else self.decoder.stage.deliver(logits, step)
        hidden = stream.settled(self.layers[-1].ffn_norm)
        return hidden[:0] if driver.is_collecting() else self.decoder.stage.leave(self, hidden, step)

    def prepare(
        self, max_rows: int, steps: Iterable[Step], caches: Sequence[KvCache], then: Iterable[Callable[[], object]] = ()
    ) -> None:
        """Compiles what these steps need, what is called after them, and steps of up to so many rows, several kernels at a time."""
        steps = list(steps)
        with driver.collecting() as units:
            for step in steps:
                self(step, caches)
            for call in then:
                call()
        units |= {variant.unit for variant in self._integer_kernels(max_rows)}
        with ThreadPoolExecutor(2) as others:  # Triton's compiler uses one core, and nearly as long as the others together
            begun = others.submit(self._compile_begun, steps[0], caches[0], max_rows)
            compiled = others.submit(driver.compile_all, units)
            self._plan_prompts(max_rows)
            compiled.result()
            begun.result()

    def _integer_kernels(self, max_rows: int) -> set[int8.Variant]:
        needed: set[int8.Variant] = set()
        for layer in {type(layer.feed): layer for layer in self.layers if layer.in_int8}.values():
            counts = range(layer.most_streamed + 1, max_rows + 1)
            needed |= {int8.whole_variant(rows, layer.qkv) for rows in counts}
            needed |= {int8.parts_variant(rows, layer.out) for rows in counts}
            needed |= layer.feed.int8_kernels(counts)
        return needed

    def _plan_prompts(self, max_rows: int) -> None:
        """Attention of new prompts, once for each padded length: cuDNN keeps plans, those of each thread apart, so this is done in the one that runs
        steps. It leaves Python's lock to the compilers meanwhile."""
        layer = self.layers[0]
        device = layer.qkv.data.device
        if device.type != "cuda":
            return
        with sdpa_kernel(BACKENDS, set_priority=True):
            for rows in planned_rows(max_rows):
                qkv = torch.zeros(rows, layer.qkv.rows, dtype=torch.bfloat16, device=device)
                attend_whole(*layer.heads_of(qkv), layer.mixer.scale)

    @torch.inference_mode()
    def _compile_begun(self, step: Step, cache: KvCache, max_rows: int) -> None:
        """The kernels of prompts that have begun, with few rows and with many. `step`: any, for its block table."""
        layer, device = self.layers[0], step.tokens.device
        with torch.cuda.device(device):
            for rows in BEGUN_ROWS:
                length = min(max_rows + rows, step.blocks.shape[1] * BLOCK_TOKENS)
                if length <= rows:
                    continue
                qkv = torch.zeros(rows, layer.qkv.rows, dtype=torch.bfloat16, device=device)
                layer.general_attention(layer.heads_of(qkv), continued(step, rows, length), cache)

    def make_draft_head(self) -> None:
        head = self.decoder.head
        if self.draft_head is None and isinstance(head, Tensor) and fits_tiles(*head.shape):
            self.draft_head = quantized(head)

    def experts_touched(self, rows: int) -> float | None:
        """Average number of experts used per routed layer by the last step of up to 64 rows. Synchronizes."""
        ids = [layer.feed.chosen(rows).ids for layer in self.layers if isinstance(layer.feed, RoutedFeed)]
        return sum(chosen.unique().numel() for chosen in ids) / len(ids) if ids and rows <= MAX_ROWS else None

    def _few(self, stream: ResidualStream, space: AttentionLaunch, caches: Sequence[KvCache]) -> ResidualStream:
        for layer, cache in self._passed_layers(caches):
            layer.few(stream.h, cache, space)
        return stream

    def _more(self, stream: ResidualStream, space: AttentionLaunch, caches: Sequence[KvCache]) -> ResidualStream:
        rows = stream.h.shape[0]
        for layer, cache in self._passed_layers(caches):
            (layer.several if rows <= layer.most_streamed else layer.wide)(stream, cache, space)
        return stream

    def _passed_layers(self, caches: Sequence[KvCache]) -> Iterable[tuple[FusedLayer, KvCache]]:
        """Where kernels are only noted, layers of one kind need the same."""
        every = zip(self.layers, caches, strict=True)
        return {layer.kind: (layer, cache) for layer, cache in every}.values() if driver.is_collecting() else every

    def _logits(self, stream: ResidualStream, step: Step) -> Tensor:
        rows, width = stream.h.shape
        if rows == 1 and width <= ONE_ROW_WIDTH:
            return self._logits_of_one(stream.h[0], step)
        x = stream.normed(self.decoder.norm.weight)
        if self.hidden is not None:
            self.hidden[:rows] = x
        if step.logit_rows.shape[0] != rows:
            x = x[step.logit_rows]
        return wide_product(x, self.decoder.head)

    def _logits_of_one(self, h: Tensor, step: Step) -> Tensor:
        if self.hidden is not None:
            self.hidden[:1] = ResidualStream(h[None], self.eps).normed(self.decoder.norm.weight)
        head = self.decoder.head
        logits = torch.empty(1, head.shape[0], dtype=torch.float32, device=h.device)
        if step.logit_rows.shape[0] == 0:
            return logits[:0]
        norm.head_one(h, self.decoder.norm.weight, head, logits[0], self.eps)
        return logits

    def space(self, step: Step) -> AttentionLaunch:
        starts, lengths = step.sizes()
        decoding = next((i for i, (a, b) in enumerate(pairwise(starts)) if b - a > 1), len(lengths))
        longest = max(lengths[:decoding], default=1)
        splits, shape = heads.launch_shape(longest, max(decoding, 1), self.num_kv_heads)
        size = decoding * self.num_heads * splits * (HEAD_DIM + 2)
        partial = torch.empty(size, dtype=torch.float32, device=step.lengths.device)
        whole = decoding == len(lengths)
        first, prompts = (step, None) if whole else (step.part(0, decoding), prompts_of(step, decoding))
        return AttentionLaunch(heads.AttentionWorkspace(partial, self._arrived), splits, shape, first, prompts)

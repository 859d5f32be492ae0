"""Time of a forward pass in our fused GPU kernels, kernel by kernel: memory reads or FLOPs, overhead, and the gap after each kernel.

Kernel selection by rows per step mirrors nn.fused: one row streams all weights; 2 to 64 rows stream the experts, eight rows per work item,
and from nine rows on use tiled matmuls for the other matrices (in integers where a model is dense); more rows use tiled matmuls
everywhere. Tiles run in waves over the SMs, so a partial wave takes as long as a full one. Constants and their measurements:
engines/kernel_times.py, core/integer_units.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, exp, lgamma, log, log1p

from windlass.core import fused
from windlass.core.fused import BLOCK_INPUTS, HEAD_DIM, TILE_ROWS, num_blocks
from windlass.core.hardware.spec import Device
from windlass.core.integer_units import ITEM_BLOCKS, ITEM_SECONDS, MOST_SLICES, Cut, cut, item_rows
from windlass.core.layout import Layout
from windlass.core.model import Attention, Layer, ModelSpec, MoE
from windlass.core.place import Placement, local_experts, local_shape, stored
from windlass.core.rule import ModelPart, Role, Rule
from windlass.core.scheme import Scheme
from windlass.tasks.plan.engines.kernel_times import KernelTimes

FEW_ROWS, STREAMED_ROWS, DEPENDENT_ROWS = 8, 64, 1024
"""As in nn.fused: rows per work item; rows up to which experts are streamed; rows up to which dependent launch is used."""
SLICE_BLOCKS = 32
"""Blocks of a row that fit in a warp's registers: longer rows of a few-row matmul are split."""
WHOLE_TOKENS, SPLIT_TOKENS, MAX_SPLITS = 512, 256, 64
"""Attention handles sequences up to WHOLE_TOKENS as one work unit; longer ones are split into units of at least SPLIT_TOKENS."""
UNITS_TOGETHER = 3
"""Of attention, on a multiprocessor: two to four by their size (runtime/kernels/cuda/attention.py)."""
ITEM_ROWS = (64, 128, 160)
"""Rows of an expert per work item above 64 rows, if it has more than `STREAMED_MEAN` rows on average."""
STREAMED_MEAN = 12
INTEGER_MEAN = 6
"""The same with integer products."""
PROCESSORS = {"H100-PCIe": 114, "H20": 78}
HOPPER_PROCESSORS = 132
MEASURED_RATE = 790e12
"""bf16 FLOP/s of the GPU on which blocks were timed; slower ones take longer."""


@dataclass(frozen=True)
class PackedMatrix:
    """4-bit weights in the kernels' layout: tiles of 16 rows, blocks of 128 inputs with their scales."""

    rows: int
    inputs: int
    group: int = 128

    @property
    def blocks(self) -> int:
        return num_blocks(self.inputs)

    @property
    def num_bytes(self) -> int:
        return (
            -(-self.rows // TILE_ROWS)
            * self.blocks
            * (TILE_ROWS * BLOCK_INPUTS // 2 + BLOCK_INPUTS // self.group * TILE_ROWS * 2)
        )


@dataclass(frozen=True)
class LayerShape:
    """The shard of a layer on one device."""

    qkv: PackedMatrix
    out: PackedMatrix
    gate_up: PackedMatrix
    """Of one expert in a MoE layer."""
    down: PackedMatrix
    kv_heads: int
    head_norm: bool
    kv_bytes: float = 4.0 * HEAD_DIM
    """Key and value of a token and head."""
    experts: int = 0
    """Experts on this device; 0: a dense feed-forward."""
    all_experts: int = 0
    active: int = 0
    shared: int = 0

    @property
    def hidden(self) -> int:
        return self.qkv.inputs

    @property
    def in_integers(self) -> bool:
        """Whether many rows are multiplied in integers."""
        return all(matrix.group == BLOCK_INPUTS for matrix in (self.qkv, self.out, self.gate_up, self.down))


def applies(spec: ModelSpec, how: Scheme, device: Device) -> bool:
    return fused.has_kernels(device.name) and not fused.unsupported_storage(how) and not fused.unsupported(spec)


# --- shapes ----------------------------------------------------------------------------------------------------------


def layer_shapes(
    spec: ModelSpec, rules: tuple[Rule, ...], placement: Placement, layout: Layout, how: Scheme, tp_index: int
) -> tuple[LayerShape, ...]:
    """Equal layers share one object, so that each distinct layer is timed once."""
    matrices: dict[int, tuple[str, PackedMatrix]] = {}
    of_layer: list[list[int]] = [[] for _ in spec.layers]
    for number, rule in enumerate(rules):
        if rule.part is not ModelPart.MAIN or rule.role is not Role.MATRIX or rule.layers is None:
            continue
        rows, inputs = local_shape(rule, placement, tp_index)
        name = rule.ours.removeprefix("layers.{layer}.")
        matrices[number] = name, PackedMatrix(rows, inputs, stored(rule, how).group or BLOCK_INPUTS)
        for layer in rule.layers:
            of_layer[layer].append(number)
    held = local_experts(placement, layout, tp_index)
    known: dict[tuple[int, ...], LayerShape] = {}
    for layer, numbers in zip(spec.layers, of_layer, strict=True):
        if (key := tuple(numbers)) not in known:
            known[key] = _layer_shape(layer, dict(matrices[number] for number in numbers), held, how)
    return tuple(known[tuple(numbers)] for numbers in of_layer)


def _layer_shape(layer: Layer, matrices: dict[str, PackedMatrix], held: int, how: Scheme) -> LayerShape:
    assert isinstance(layer.mixer, Attention)
    ffn = layer.feed_forward
    prefix = "ffn.experts.{expert}." if isinstance(ffn, MoE) else "ffn."
    gate, down = matrices[f"{prefix}gate.weight"], matrices[f"{prefix}down.weight"]
    q, k, v = (matrices[f"mixer.{part}.weight"] for part in "qkv")
    mixture = ffn if isinstance(ffn, MoE) else None
    return LayerShape(
        qkv=PackedMatrix(q.rows + k.rows + v.rows, q.inputs, q.group),
        out=matrices["mixer.o.weight"],
        gate_up=PackedMatrix(2 * gate.rows, gate.inputs, gate.group),
        down=down,
        kv_heads=-(-k.rows // HEAD_DIM),
        head_norm=layer.mixer.qk_norm,
        kv_bytes=2 * (HEAD_DIM * how.kv_element_bytes + how.kv_vector_bytes),
        experts=held if mixture else 0,
        all_experts=mixture.num_experts if mixture else 0,
        active=mixture.num_active if mixture else 0,
        shared=int(mixture.shared_intermediate_size > 0) if mixture else 0,
    )


# --- experts ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def items_of(rows: int, chance: float, item_rows: int) -> float:
    """Expected work items of an expert if each of `rows` rows selects it with probability `chance`: the mean of ceil(n / item_rows)."""
    mean, reach = rows * chance, 12 * (rows * chance * (1 - chance)) ** 0.5 + 12
    likely = range(max(0, int(mean - reach)), min(rows, int(mean + reach)) + 1)
    return sum(ceil(n / item_rows) * _binomial(n, rows, chance) for n in likely)


def _binomial(n: int, rows: int, chance: float) -> float:
    if chance >= 1.0:
        return float(n == rows)
    ways = lgamma(rows + 1) - lgamma(n + 1) - lgamma(rows - n + 1)
    return exp(ways + n * log(chance) + (rows - n) * log1p(-chance))


# --- kernels ---------------------------------------------------------------------------------------------------------


class KernelModel:
    """Seconds of each kernel on one device."""

    def __init__(self, times: KernelTimes, device: Device) -> None:
        self.times, self.bandwidth, self.rate = times, device.measured_bandwidth, device.matmul_flops("bf16")
        self.processors = PROCESSORS.get(device.name, HOPPER_PROCESSORS)

    def step(self, head_bytes: float, vocab: int, rows: int) -> float:
        """Once per step: head, sampling, host work."""
        logits = 4 * vocab * rows
        return self.times.step + self.times.small + (head_bytes + logits) / self.bandwidth

    def layer(self, shape: LayerShape, rows: int, sequences: int, context: int, *, crowd: float = 1.0) -> float:
        """`rows` tokens of `sequences`, each attending to `context` tokens; rows == sequences is a decode step.

        `crowd`: work items of the busiest rank over the mean.
        """
        mixer = self.decode_attention(shape, sequences, context)
        if rows > sequences:
            mixer = self._prompt_attention(shape, rows, context)
        if shape.head_norm:
            mixer += self.times.small + rows * shape.qkv.rows * 4 / self.bandwidth
        if rows == 1:
            return mixer + self._one(shape)
        gaps = 0.0 if rows <= DEPENDENT_ROWS else self.times.gap * (8 + 2 * bool(shape.experts) + shape.head_norm)
        halves = self._halves(shape, rows, crowd)
        return max(mixer + halves + gaps, self.times.eager if rows > max(sequences, STREAMED_ROWS) else 0.0)

    def _halves(self, shape: LayerShape, rows: int, crowd: float) -> float:
        """All of a layer but attention."""
        if shape.in_integers and rows > (STREAMED_ROWS if shape.experts else FEW_ROWS):
            return self._integers(shape, rows, crowd)
        return (self._many if rows > STREAMED_ROWS else self._several)(shape, rows, crowd)

    # one row

    def _one(self, shape: LayerShape) -> float:
        times, slots = self.times, max(shape.active * shape.experts / max(shape.all_experts, 1) + shape.shared, 1)
        read = shape.qkv.num_bytes + shape.out.num_bytes + slots * (shape.gate_up.num_bytes + shape.down.num_bytes)
        router = times.small + shape.all_experts * shape.hidden * 4 / self.bandwidth if shape.experts else 0.0
        return read / self.bandwidth + 2 * (times.first + times.last) + router

    # 2 to 64 rows

    def _several(self, shape: LayerShape, rows: int, crowd: float) -> float:
        few = rows <= FEW_ROWS
        qkv, out = self.short(shape.qkv, rows, cut=False), self.short(shape.out, rows, cut=True)
        if shape.experts:
            feed = self._routed(shape, rows, crowd) + self._route(rows)
        else:
            up = self.streamed(shape.gate_up.num_bytes) if few else self._tiled(shape.gate_up, rows, 1)
            feed = up + self.short(shape.down, rows, cut=True)
        parts = shape.active + shape.shared if shape.experts else self._slices(shape.down, rows)
        norms = sum(self._add_norm(shape.hidden, rows, 4, count) for count in (self._slices(shape.out, rows), parts))
        return qkv + out + feed + norms

    def short(self, matrix: PackedMatrix, rows: int, *, cut: bool) -> float:
        """A few rows stream the weights, split along the inputs if these are long and partial sums are allowed (`cut`)."""
        if rows <= FEW_ROWS and (cut or matrix.blocks <= SLICE_BLOCKS):
            return self.streamed(matrix.num_bytes)
        return self._tiled(matrix, rows, self._slices(matrix, rows) if cut else 1)

    def _slices(self, matrix: PackedMatrix, rows: int) -> int:
        if rows <= FEW_ROWS:
            return -(-matrix.blocks // SLICE_BLOCKS)
        groups = -(-matrix.rows // 128)
        return max((s for s in range(1, matrix.blocks + 1) if not matrix.blocks % s and groups * s <= self.processors), default=1)

    def streamed(self, num_bytes: float) -> float:
        return self.times.stream + num_bytes / (self.bandwidth * self.times.stream_share)

    def _tiled(self, matrix: PackedMatrix, rows: int, slices: int) -> float:
        """A work unit has 128 rows of weights: dequantize, load activations from L2, multiply."""
        times = self.times
        waves = ceil(-(-matrix.rows // 128) * slices / self.processors)
        product = 2 * 128 * BLOCK_INPUTS * 64 * self.processors / self.rate
        block = max(times.widen + rows * BLOCK_INPUTS * 2 / times.cache_port, product)
        return times.tiled + max(waves * matrix.blocks / slices * block, matrix.num_bytes / self.bandwidth)

    def _route(self, rows: int) -> float:
        return self.times.route + rows * self.times.route_row

    def _add_norm(self, hidden: int, rows: int, part_bytes: int, parts: int) -> float:
        """Reads and writes the fp32 residual, reads the partial sums, writes the normed rows."""
        share = 1.0 if rows <= STREAMED_ROWS else self.times.sum_share
        return self.times.sum + rows * hidden * (parts * part_bytes + 10) / (self.bandwidth * share)

    # more rows

    def _integers(self, shape: LayerShape, rows: int, crowd: float) -> float:
        """Rows are rounded to 8 bits; products are cut as the kernels cut them."""
        whole, parts, inner = [shape.qkv], [shape.out], shape.out.inputs
        if not shape.experts:
            whole, parts, inner = [shape.qkv, shape.gate_up], [shape.out, shape.down], inner + shape.down.inputs
        cuts = [self._cut(matrix, rows, 1) for matrix in whole] + [self._cut(matrix, rows) for matrix in parts]
        products = sum(self._integer_product(of.num_bytes, way.seconds) for of, way in zip(whole + parts, cuts, strict=True))
        norms = sum(self._sums(shape.hidden, rows, way.slices) for way in cuts[len(whole) :])
        rest = self._routed_integers(shape, rows, crowd) if shape.experts else 0.0
        return products + norms + self._rounded(rows * inner) + rest

    def _cut(self, matrix: PackedMatrix, rows: int, most_slices: int = MOST_SLICES) -> Cut:
        return cut(rows, -(-matrix.rows // TILE_ROWS), matrix.blocks, self.processors, most_slices)

    def _integer_product(self, num_bytes: float, seconds: float) -> float:
        """`seconds`: on the GPU where units were timed."""
        return self.times.tiled + max(seconds * max(MEASURED_RATE / self.rate, 1.0), num_bytes / self.bandwidth)

    def _rounded(self, numbers: float) -> float:
        """bf16 is read, bytes are written."""
        return self.times.small + 3 * numbers / (self.bandwidth * self.times.round_share)

    def _routed_integers(self, shape: LayerShape, rows: int, crowd: float) -> float:
        norm = self._add_norm(shape.hidden, rows, 2, shape.active + shape.shared)
        before = norm + self._logits(shape, rows) + self.times.dispatch
        mean = rows * shape.active / shape.all_experts
        if mean <= INTEGER_MEAN:
            return before + self._routed(shape, rows, crowd)
        size = item_rows(mean)
        items = shape.experts * items_of(rows, shape.active / shape.all_experts, size) * crowd + shape.shared * -(-rows // size)
        held = shape.experts * shape.active / shape.all_experts + shape.shared
        return (
            before
            + sum(self._items(of, items, size) for of in (shape.gate_up, shape.down))
            + self._rounded(rows * held * shape.down.inputs)
        )

    def _items(self, matrix: PackedMatrix, items: float, size: int) -> float:
        """An item's weights are read once for each; a unit has the overhead of a few blocks."""
        waves = ceil(-(-matrix.rows // 256) * items / self.processors)
        return self._integer_product(matrix.num_bytes * items, waves * (matrix.blocks + ITEM_BLOCKS) * ITEM_SECONDS[size])

    def _logits(self, shape: LayerShape, rows: int) -> float:
        """The fp32 router weights are split into three bf16 numbers each."""
        return 6 * rows * shape.hidden * shape.all_experts / (self.rate * self.times.product_share)

    def _many(self, shape: LayerShape, rows: int, crowd: float) -> float:
        items, out, down = -(-rows // 128), self._wide_slices(shape.out, rows), self._wide_slices(shape.down, rows)
        mixer = self.products(shape.qkv, items, 128) + self.products(shape.out, items, 128, out)
        norms = self._sums(shape.hidden, rows, out)
        if not shape.experts:
            feed = self.products(shape.gate_up, items, 128) + self.products(shape.down, items, 128, down)
            return mixer + norms + self._sums(shape.hidden, rows, down) + feed
        norms += self._add_norm(shape.hidden, rows, 2, shape.active + shape.shared)
        return mixer + norms + self._logits(shape, rows) + self.times.dispatch + self._routed(shape, rows, crowd)

    def _routed(self, shape: LayerShape, rows: int, crowd: float) -> float:
        """Up to 64 rows, or few rows per expert: eight rows per work item; else enough for most experts in one item."""
        mean = rows * shape.active / shape.all_experts
        few = rows <= STREAMED_ROWS or mean <= STREAMED_MEAN
        size = FEW_ROWS if few else next((one for one in ITEM_ROWS if one >= mean + 2 * mean**0.5), ITEM_ROWS[-1])
        items = shape.experts * items_of(rows, shape.active / shape.all_experts, size) * crowd + shape.shared * -(-rows // size)
        if few:
            return sum(self.streamed(matrix.num_bytes * items) for matrix in (shape.gate_up, shape.down))
        filled = min(size, mean + 2 * mean**0.5)
        return sum(self.products(matrix, items, filled) for matrix in (shape.gate_up, shape.down))

    def _wide_slices(self, matrix: PackedMatrix, rows: int) -> int:
        """Split-K factor, while rows alone do not fill the SMs."""
        groups = -(-matrix.rows // 256) * -(-rows // 128)
        return max((s for s in range(1, matrix.blocks + 1) if not matrix.blocks % s and groups * s <= self.processors), default=1)

    def _sums(self, hidden: int, rows: int, slices: int) -> float:
        return self._add_norm(hidden, rows, 2 if slices == 1 else 4, slices)

    def products(self, matrix: PackedMatrix, items: float, item_rows: float, slices: int = 1) -> float:
        """A work unit has 256 rows of weights and one item, plus a fixed overhead of a few blocks. Products are as wide as an item is filled."""
        times = self.times
        waves = ceil(-(-matrix.rows // 256) * items * slices / self.processors)
        block = (times.block + item_rows * times.block_row) * max(MEASURED_RATE / self.rate, 1.0)
        return times.tiled + waves * (matrix.blocks / slices + times.unit_blocks) * block

    # attention

    def decode_attention(self, shape: LayerShape, sequences: int, context: int) -> float:
        """A work unit is one KV head of a sequence, or a split of it; few units leave most of the bandwidth unused."""
        groups, splits = sequences * shape.kv_heads, 1
        if context > WHOLE_TOKENS and groups < 2 * self.processors:
            splits = max(1, min(self.processors // groups, -(-context // SPLIT_TOKENS), MAX_SPLITS))
        waves = max(groups / (self.processors * UNITS_TOGETHER), 1.0)
        reached = self.bandwidth * min(groups * splits / self.processors, 1.0)
        read = groups * context * shape.kv_bytes
        return waves * self.times.attention + (self.times.split if splits > 1 else 0.0) + read / reached

    def _prompt_attention(self, shape: LayerShape, rows: int, context: int) -> float:
        """Rotary embedding reads and writes the rows once; each row attends to `context` keys on average."""
        rotate = rows * shape.qkv.rows * 4 / (self.bandwidth * self.times.sum_share)
        scores = 4.0 * rows * context * shape.out.inputs / (self.rate * self.times.score_share)
        return 2 * self.times.small + rotate + scores

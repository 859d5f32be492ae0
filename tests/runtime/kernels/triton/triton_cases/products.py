"""Products and routed feed-forwards against plain references, see __init__.py."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from triton_cases.compare import CASES, LARGE, TYPES, close, numbers, repeats
from windlass.core.ggml.forms import FORMS
from windlass.core.model import Activation
from windlass.runtime.kernels.arguments import ExpertsArgs
from windlass.runtime.kernels.ops import experts, linear
from windlass.runtime.kernels.packing.packed_rows import PackedRows
from windlass.runtime.kernels.packing.panel_data import KINDS
from windlass.runtime.kernels.triton import ops
from windlass.runtime.kernels.triton.tiles import dispatch


def packed(kind: str, num_out: int, num_in: int, group: int, device: str, num_experts: int = 0, seed: int = 0) -> PackedRows:
    scale = (
        torch.float32
        if kind == "fp8"
        else torch.float16
        if kind in FORMS
        else (torch.bfloat16, torch.float16, torch.float32)[seed % 3]
    )
    return PackedRows.random(kind, num_out, num_in, group, num_experts, scale, device, deviation=num_in**-0.5, seed=seed)


def check_linear(
    device: str,
    *,
    kind: str,
    dtype: torch.dtype,
    rows: int,
    num_out: int,
    num_in: int,
    group: int,
    more: bool = True,
    seed: int = 0,
) -> None:
    draw = numbers(seed, device, dtype)
    weight, x = packed(kind, num_out, num_in, group, device, seed=seed), draw(rows, num_in)
    bias, add = (draw(num_out).float(), draw(rows, num_out)) if more else (None, None)
    wanted = linear.reference(x.double(), weight.dense().double(), bias, add)
    mine = ops.linear(x, weight, bias, add)
    close(mine, wanted, dtype)
    assert mine.dtype == dtype
    repeats(lambda: ops.linear(x, weight, bias, add), mine)
    tokens = torch.tensor([num_out - 1, 0, num_out // 2], dtype=torch.int32, device=device)
    close(ops.embed(tokens, weight, dtype), weight.rows(tokens), dtype)


SHAPES = ((1, 70, 256, 32), (3, 130, 1024, 128), (17, 64, 192, 96), (40, 33, 128, 64), (70, 24, 128, 128))
for _kind in KINDS:
    for _type, _shape in zip(("fp32", "bf16", "fp16", "fp32", "fp16"), SHAPES, strict=True):
        _rows, _out, _in, _group = _shape
        CASES[f"linear {_kind} {_type} {_shape}"] = partial(
            check_linear,
            kind=_kind,
            dtype=TYPES[_type],
            rows=_rows,
            num_out=_out,
            num_in=_in,
            group=_group,
            more=_rows != 3,
            seed=_rows,
        )
    for _type in ("bf16", "fp16"):
        for _rows in (1, 17, 64, 300) if _type == "bf16" else (8, 64):
            LARGE[f"linear {_kind} {_type} {_rows} rows"] = partial(
                check_linear,
                kind=_kind,
                dtype=TYPES[_type],
                rows=_rows,
                num_out=1536,
                num_in=2048,
                group=(128, 32, 64)[_rows % 3],
            )


for _number, (_kind, _form) in enumerate(FORMS.items()):
    _type, _rows = ("fp32", "bf16", "fp16")[_number % 3], (1, 17, 3)[_number % 3]
    CASES[f"linear {_kind} {_type}"] = partial(
        check_linear, kind=_kind, dtype=TYPES[_type], rows=_rows, num_out=40, num_in=256, group=_form.elements, more=_rows != 3, seed=1
    )  # fmt: skip
    for _rows in (1, 17, 64, 300):
        LARGE[f"linear {_kind} bf16 {_rows} rows"] = partial(
            check_linear, kind=_kind, dtype=torch.bfloat16, rows=_rows, num_out=1536, num_in=2048, group=_form.elements, seed=1
        )  # fmt: skip


def check_experts(
    device: str, *, kind: str, dtype: torch.dtype, rows: int, num_experts: int, active: int, hidden: int, width: int,
    activation: Activation = Activation.SILU, more: bool = False, group: int = 32, weight_dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    draw = numbers(rows, device)
    if kind == "plain":
        gate_up, down = (draw(num_experts, *shape) / shape[1] ** 0.5 for shape in ((2 * width, hidden), (hidden, width)))
        gate_up, down = gate_up.to(weight_dtype or dtype), down.to(weight_dtype or dtype)
    else:
        gate_up, down = (packed(kind, *shape, group, device, num_experts, 3) for shape in ((2 * width, hidden), (hidden, width)))
    x, shares = draw(rows, hidden).to(dtype), draw(rows, active).abs()
    ids = torch.stack([torch.randperm(num_experts, generator=torch.Generator().manual_seed(row))[:active] for row in range(rows)])
    ids = ids.int().to(device)
    how: dict[str, object] = dict.fromkeys(("gate_up_bias", "down_bias", "clamp", "add"))
    if more:
        how = {"gate_up_bias": draw(num_experts, 2 * width), "down_bias": draw(num_experts, hidden), "clamp": 1.25}
        how["add"] = draw(rows, hidden).to(dtype)
    mine = ops.experts(ExpertsArgs(x, ids, shares, gate_up, down, activation, **how))
    wide = [matrix.float() if isinstance(matrix, Tensor) else matrix for matrix in (gate_up, down)]
    close(mine, experts.reference(ExpertsArgs(x.float(), ids, shares, *wide, activation, **how)), dtype)
    repeats(lambda: ops.experts(ExpertsArgs(x, ids, shares, gate_up, down, activation, **how)), mine)


for _number, _kind in enumerate((*KINDS, "plain")):
    _type = ("fp32", "bf16", "fp16")[_number % 3]
    _how = {"kind": _kind, "dtype": TYPES[_type], "activation": list(Activation)[_number % 4]}
    CASES[f"experts {_kind} {_type} 1 row"] = partial(
        check_experts, rows=1, num_experts=5, active=3, hidden=256, width=64, **_how
    )
    CASES[f"experts {_kind} {_type} 9 rows"] = partial(
        check_experts, rows=9, num_experts=4, active=2, hidden=64, width=96, more=True, **_how
    )
    for _rows in (1, 8, 64, 600):
        LARGE[f"experts {_kind} bf16 {_rows} rows"] = partial(
            check_experts, kind=_kind, dtype=torch.bfloat16, rows=_rows, num_experts=32, active=4, hidden=512, width=384, more=_rows == 8,
            group=128,
        )  # fmt: skip
CASES["experts iq4_nl bf16 3 rows"] = partial(
    check_experts, kind="iq4_nl", dtype=torch.bfloat16, rows=3, num_experts=3, active=2, hidden=64, width=32
)
for _kind, _rows in (("q4_k", 3), ("iq2_xs", 1), ("q6_k", 90)):
    LARGE[f"experts {_kind} bf16 {_rows} rows"] = partial(
        check_experts, kind=_kind, dtype=torch.bfloat16, rows=_rows, num_experts=8, active=2, hidden=512, width=256, group=256
    )
CASES["experts crowded"] = partial(
    check_experts, kind="int4", dtype=torch.float32, rows=40, num_experts=2, active=1, hidden=32, width=32
)
CASES["experts plain of another type and odd sizes"] = partial(
    check_experts,
    kind="plain",
    dtype=torch.float32,
    rows=3,
    num_experts=3,
    active=2,
    hidden=44,
    width=20,
    weight_dtype=torch.bfloat16,
)


def check_absent(device: str) -> None:
    """An expert that is not here adds nothing, whatever its number is."""
    draw = numbers(1, device)
    gate_up, down = packed("int4", 64, 64, 32, device, 4), packed("int4", 64, 32, 32, device, 4)
    x, shares, add = draw(6, 64), draw(6, 2).abs(), draw(6, 64)
    ids = torch.full((6, 2), 3, dtype=torch.int32, device=device)
    lone = ops.experts(ExpertsArgs(x, ids[:, :1], shares[:, :1], gate_up, down, Activation.GELU, down_bias=draw(4, 64) * 0 + 1))
    for absent in (-1, 4, 99):
        ids[:, 1] = absent
        assert torch.equal(
            ops.experts(ExpertsArgs(x, ids, shares, gate_up, down, Activation.GELU, down_bias=draw(4, 64) * 0 + 1)), lone
        )
    nobody = ops.experts(ExpertsArgs(x, torch.full_like(ids, -1), shares, gate_up, down, Activation.GELU, add=add))
    assert torch.equal(nobody, add)


def check_dispatch(device: str, *, rows: int, num_experts: int, active: int, tile: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    ids = torch.randint(-1, num_experts + 1, (rows, active), generator=draw).int()
    found = dispatch.dispatch(ids.to(device), num_experts, tile)
    order, tiles = found.order.tolist(), [tile for tile in found.tiles.T.tolist() if tile[0] >= 0]
    seen = [(expert, item) for expert, first, count in tiles for item in order[first : first + count]]
    flat = ids.flatten().tolist()
    assert seen == sorted((expert, item) for item, expert in enumerate(flat) if 0 <= expert < num_experts)
    assert all(0 < count <= tile for _, _, count in tiles)


CASES["experts elsewhere"] = check_absent
CASES["dispatch few"] = partial(check_dispatch, rows=7, num_experts=5, active=3, tile=4)
CASES["dispatch many"] = partial(check_dispatch, rows=300, num_experts=3, active=4, tile=16)
LARGE["dispatch"] = partial(check_dispatch, rows=3000, num_experts=130, active=8, tile=64)

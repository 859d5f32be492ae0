"""Attention against plain references, see __init__.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from triton_cases.compare import CASES, LARGE, TYPES, close, numbers, repeats
from windlass.runtime.kernels.arguments import AttentionArgs
from windlass.runtime.kernels.ops import attention
from windlass.runtime.kernels.step import BLOCK_TOKENS, KvCache, Step, attention_cache, latent_cache
from windlass.runtime.kernels.triton import ops


def make_step(sequences: Sequence[tuple[int, int]], device: str, seed: int = 0, spare: int = 0) -> Step:
    """(tokens in all, of them new) of each; blocks in no order; `spare` more columns of the table, with rubbish in them."""
    draw = torch.Generator().manual_seed(seed)
    most = max(-(-length // BLOCK_TOKENS) for length, _ in sequences)
    table = torch.randperm(most * len(sequences), generator=draw).view(len(sequences), -1).int()
    for row, (length, _) in zip(table, sequences, strict=True):
        row[-(-length // BLOCK_TOKENS) :] = 2**30
    table = torch.cat((table, torch.full((len(sequences), spare), 2**30, dtype=torch.int32)), dim=1)
    positions = [at for length, new in sequences for at in range(length - new, length)]
    starts = list(accumulate((new for _, new in sequences), initial=0))

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    nothing = ints([0] * len(positions))
    return Step(
        tokens=nothing, positions=ints(positions), slots=nothing, starts=ints(starts), lengths=ints([length for length, _ in sequences]),
        blocks=table.to(device), logit_rows=ints([]),
        counts=torch.tensor([len(positions), len(sequences), 0], dtype=torch.int32),
    )  # fmt: skip


def fill(cache: KvCache, step: Step, kv_heads: int, dim: int, seed: int) -> None:
    """What no sequence owns is not a number: whoever reads it is found out."""
    draw = numbers(seed, cache.keys.device.type)
    for part in (cache.keys, cache.values):
        if part is not None:
            part.fill_(float("nan"))
    for row, length in zip(step.blocks, step.lengths.tolist(), strict=True):
        tokens = torch.arange(length, device=row.device)
        slots = row[tokens // BLOCK_TOKENS] * BLOCK_TOKENS + tokens % BLOCK_TOKENS
        keys, values = draw(length, kv_heads, dim), draw(length, kv_heads, dim)
        cache.store(keys, None if cache.values is None else values, slots)


def check_attention(
    device: str, *, num_heads: int, kv_heads: int, dim: int, sequences: Sequence[tuple[int, int]], dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None, window: int | None = None, sinks: bool = False, slopes: bool = False, latent_dim: int = 0,
    spare: int = 0,
) -> None:  # fmt: skip
    step, draw = make_step(sequences, device, num_heads, spare), numbers(dim, device)
    num_blocks = int(step.blocks[step.blocks < 2**30].max()) + 1
    if latent_dim:
        cache = latent_cache(num_blocks, latent_dim, dim - latent_dim, cache_dtype or dtype, device)
    else:
        cache = attention_cache(num_blocks, kv_heads, dim, cache_dtype or dtype, device)
    fill(cache, step, kv_heads, dim, seed=dim)
    q = draw(len(step.positions), num_heads, dim).to(dtype)
    how = {"scale": dim**-0.5, "window": window, "sinks": draw(num_heads) * 3 if sinks else None}
    how["slopes"] = draw(num_heads).abs() * 0.1 if slopes else None
    mine = ops.attention(AttentionArgs(q, q, q, step, cache, **how))
    close(mine, attention.reference(AttentionArgs(q.float(), q, q, step, cache, **how)), dtype)
    repeats(lambda: ops.attention(AttentionArgs(q, q, q, step, cache, **how)), mine)


SEQUENCES = {
    "one": ((75, 1),),
    "decode": ((1, 1), (17, 1), (300, 1)),
    "prompt": ((70, 37),),  # more than one block of tokens; whole ones, from the first token on, are in "mixed"
    "mixed": ((33, 33), (40, 1), (5, 5), (50, 18), (1, 1)),
}
ATTENTION = (
    ("9/3 heads of 64", "fp32", {"num_heads": 9, "kv_heads": 3, "dim": 64}),
    ("4/4 heads of 80", "fp16", {"num_heads": 4, "kv_heads": 4, "dim": 80, "slopes": True}),
    ("4/2 heads of 96", "bf16", {"num_heads": 4, "kv_heads": 2, "dim": 96, "window": 20, "sinks": True}),
    ("2/1 heads of 256", "fp16", {"num_heads": 2, "kv_heads": 1, "dim": 256}),
    ("71/1 heads of 16", "fp16", {"num_heads": 71, "kv_heads": 1, "dim": 16, "sinks": True}),
    ("3/1 heads of 10", "fp32", {"num_heads": 3, "kv_heads": 1, "dim": 10, "window": 1}),
    ("latent 32 + 8", "fp32", {"num_heads": 5, "kv_heads": 1, "dim": 40, "latent_dim": 32}),
    ("latent 24 + 16", "fp16", {"num_heads": 5, "kv_heads": 1, "dim": 40, "latent_dim": 24}),
)
for _number, (_name, _type, _how) in enumerate(ATTENTION):
    for _index, (_which, _sequences) in enumerate(SEQUENCES.items()):
        if _number % 2 == _index % 2 or _number < 1:
            CASES[f"attention {_name} {_type} {_which}"] = partial(
                check_attention, sequences=_sequences, dtype=TYPES[_type], spare=(0, 40)[_number % 2], **_how
            )
    for _which, _sequences in (("decode", SEQUENCES["decode"]), ("mixed", SEQUENCES["mixed"])):
        LARGE[f"attention {_name} {_which} bf16"] = partial(
            check_attention, sequences=_sequences, dtype=torch.bfloat16, spare=200, **_how
        )
CASES["attention split with sinks"] = partial(
    check_attention, num_heads=2, kv_heads=1, dim=16, sequences=((600, 1), (7, 1)), dtype=torch.float32, sinks=True, spare=100
)
CASES["attention split windows"] = partial(
    check_attention, num_heads=2, kv_heads=1, dim=16, sequences=((900, 1), (7, 1)), dtype=torch.float32, window=600
)
CASES["attention of fp32 queries over a bf16 cache"] = partial(
    check_attention,
    num_heads=2,
    kv_heads=1,
    dim=32,
    sequences=((40, 1), (20, 20)),
    dtype=torch.float32,
    cache_dtype=torch.bfloat16,
)
for _name, _type, _sequences, _how in (
    ("decode", "bf16", SEQUENCES["decode"], {"num_heads": 6, "kv_heads": 2, "dim": 128}),
    ("mixed, heads of 80", "fp16", SEQUENCES["mixed"], {"num_heads": 4, "kv_heads": 2, "dim": 80}),
    ("prompt", "fp32", SEQUENCES["prompt"], {"num_heads": 3, "kv_heads": 1, "dim": 64}),
    ("latent", "bf16", ((75, 1), (20, 3)), {"num_heads": 5, "kv_heads": 1, "dim": 40, "latent_dim": 32}),
):
    CASES[f"attention over an fp8 cache, {_name}"] = partial(
        check_attention, sequences=_sequences, dtype=TYPES[_type], cache_dtype=torch.float8_e4m3fn, spare=20, **_how
    )
LARGE["attention over an fp8 cache, 96/8 of 128"] = partial(
    check_attention, num_heads=96, kv_heads=8, dim=128, sequences=((9000, 300), (700, 700), (5000, 1)), dtype=torch.bfloat16,
    cache_dtype=torch.float8_e4m3fn,
)  # fmt: skip
LARGE["attention latent 512 + 64 decode"] = partial(
    check_attention, num_heads=128, kv_heads=1, dim=576, latent_dim=512, sequences=((4000, 1), (70, 1)), dtype=torch.bfloat16
)
LARGE["attention latent 512 + 64 prompt"] = partial(
    check_attention, num_heads=16, kv_heads=1, dim=576, latent_dim=512, sequences=((400, 300), (70, 1)), dtype=torch.bfloat16
)
LARGE["attention 32/8 of 128, long"] = partial(
    check_attention, num_heads=32, kv_heads=8, dim=128, sequences=((20000, 1), (3000, 1)), dtype=torch.bfloat16
)
LARGE["attention 32/8 of 128, fp32"] = partial(
    check_attention, num_heads=32, kv_heads=8, dim=128, sequences=((700, 200), (300, 1)), dtype=torch.float32
)


def check_uncached(device: str, *, latent_dim: int, dtype: torch.dtype, window: int | None = None) -> None:
    step, draw = make_step(((20, 20), (1, 1), (37, 37)), device), numbers(3, device, dtype)
    rows = len(step.positions)
    q, k = draw(rows, 4, 40), draw(rows, 1 if latent_dim else 2, 40)
    v = k[..., :latent_dim] if latent_dim else draw(rows, 2, 40)
    how = {"scale": 0.2, "window": window}
    close(
        ops.attention(AttentionArgs(q, k, v, step, None, **how)),
        attention.reference(AttentionArgs(q.float(), k.float(), v.float(), step, None, **how)),
        dtype,
    )


CASES["attention without a cache"] = partial(check_uncached, latent_dim=0, dtype=torch.float32)
CASES["attention without a cache, windows"] = partial(check_uncached, latent_dim=0, dtype=torch.float16, window=9)
CASES["attention without a cache, latent"] = partial(check_uncached, latent_dim=32, dtype=torch.float32)

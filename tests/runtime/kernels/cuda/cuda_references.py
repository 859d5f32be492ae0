"""The CUDA kernels in plain PyTorch: what they are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.core.constants import BLOCK_TOKENS
from windlass.core.fused import HEAD_DIM
from windlass.runtime.kernels.cuda.layout import Tiles, dequantize
from windlass.runtime.kernels.step import KvCache, Step


def norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def linear_reference(x: Tensor, weight: Tiles, *, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    result = x.float() @ dequantize(weight)[0].T
    result = result if bias is None else result + bias
    return result if residual is None else result + residual


def decode_attention_reference(
    qkv: Tensor, table: Tensor, positions: Tensor, slots: Tensor, lengths: Tensor, blocks: Tensor, keys: Tensor, values: Tensor,
    *, scale: float, interleaved: bool = False, scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Stores the new token's key and value in the cache, as the kernel does."""
    num_kv_heads, rows = keys.shape[1], qkv.shape[0]
    heads = qkv.shape[1] // HEAD_DIM - 2 * num_kv_heads
    q, k, v = qkv.view(rows, -1, HEAD_DIM).split((heads, num_kv_heads, num_kv_heads), dim=1)
    q = rotate_reference(q, table, positions, interleaved).to(qkv.dtype)
    cache = KvCache(keys, values, scales=scales)
    cache.store(rotate_reference(k, table, positions, interleaved).to(qkv.dtype), v, slots)
    results = []
    for row, length in enumerate(lengths.tolist()):
        k, v = (part.transpose(0, 1).float() for part in cache.gather(blocks[row], length))
        scores = torch.einsum("khd,ktd->kht", q[row].view(num_kv_heads, -1, HEAD_DIM).float(), k) * scale
        results.append(torch.einsum("kht,ktd->khd", scores.softmax(-1), v).flatten())
    return torch.stack(results)


def rotate_reference(x: Tensor, table: Tensor, positions: Tensor, interleaved: bool = False) -> Tensor:
    """x [rows, heads, dim]; the first dims rotated."""
    cos, sin = (part[:, None] for part in table[positions.long()].unbind(1))
    half = cos.shape[-1]
    x = x.float()
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.split(half, dim=-1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned, rest), dim=-1)


def head_norm_reference(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, num_kv_heads: int, eps: float) -> Tensor:
    parts = qkv.float().view(qkv.shape[0], -1, HEAD_DIM)
    q, k, v = parts.split((parts.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    normed = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w for x, w in ((q, q_norm), (k, k_norm)))
    return torch.cat((*normed, v), dim=1).flatten(1)


def experts_reference(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tiles, down: Tiles, *, num_shared: int = 0) -> Tensor:
    """fp32 [rows, outputs]: the weighted sum over a row's experts and the shared one."""
    first, second = dequantize(gate_up), dequantize(down)
    result = torch.zeros(x.shape[0], down.rows, dtype=torch.float32, device=x.device)
    for row in range(x.shape[0]):
        chosen = [*zip(ids[row].tolist(), weights[row].tolist(), strict=True)]
        chosen += [(first.shape[0] - 1, 1.0)] * num_shared
        for expert, weight in chosen:
            gate, up = (x[row].float() @ first[expert].T).chunk(2)
            hidden = (torch.nn.functional.silu(gate) * up).to(torch.bfloat16).float()
            result[row] += weight * (hidden @ second[expert].T)
    return result


def route_reference(
    logits: Tensor, correction: Tensor | None, num_active: int, routed_scale: float = 1.0, *, softmax: bool = False
) -> tuple[Tensor, Tensor]:
    scores = logits.float().softmax(-1) if softmax else logits.float().sigmoid()
    ids = (scores if correction is None else scores + correction).topk(num_active, dim=-1).indices
    weights = scores.gather(-1, ids)
    return ids.to(torch.int32), weights / weights.sum(-1, keepdim=True) * routed_scale


def greedy_reference(logits: Tensor, num_tokens: int, step: Step, counts: Tensor) -> Tensor:
    """Plain PyTorch, without synchronization."""
    best, found = logits[:, :num_tokens].max(-1)
    # Ties go to the lowest id: `max` does not guarantee which.
    found = (logits[:, :num_tokens] == best[:, None]).to(torch.uint8).argmax(-1)
    chosen = torch.where(best.isfinite(), found, -1).int()
    rows = torch.arange(len(chosen), device=logits.device)
    moves = rows < counts[0]
    position = step.positions + 1
    column = (position // BLOCK_TOKENS).clamp(max=step.blocks.shape[1] - 1).long()
    slots = step.blocks[rows, column] * BLOCK_TOKENS + position % BLOCK_TOKENS
    for old, new in (
        (step.tokens, chosen.clamp(min=0)),
        (step.positions, position),
        (step.lengths, position + 1),
        (step.slots, slots),
    ):
        old.copy_(torch.where(moves, new, old))
    return chosen


def advance_pairs_reference(chosen: Tensor, drafted: Tensor, step: Step, counts: Tensor) -> None:
    """Plain PyTorch, without synchronization. Rows beyond `counts[0]`, and one that has no second, stay."""
    first = torch.arange(0, chosen.shape[0] - 1, 2, device=chosen.device)
    accepted = (chosen[first] == step.tokens[first + 1]).int()
    at, start = first + accepted, step.positions[first] + 1 + accepted
    moves = first + 1 < counts[0]
    for side, found in enumerate((chosen, drafted)):
        row, position = first + side, start + side
        column = (position // BLOCK_TOKENS).clamp(max=step.blocks.shape[1] - 1).long()
        slots = step.blocks[row, column] * BLOCK_TOKENS + position % BLOCK_TOKENS
        for old, new in (
            (step.tokens, found[at].clamp(min=0)),
            (step.positions, position),
            (step.lengths, position + 1),
            (step.slots, slots),
        ):
            old[row] = torch.where(moves, new, old[row])

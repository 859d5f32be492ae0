"""Expert parallelism: all-to-all dispatch of rows to the ranks of their experts, and combine.

ep ranks have different tokens, so activations are exchanged, not expert gradients. Routing weights are applied by the sender.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from windlass.core.place import Interval
from windlass.runtime.nn.moe import Experts


class DispatchedExperts(nn.Module):
    """Replaces nn.moe.Experts; `inner` has this rank's experts."""

    def __init__(self, inner: Experts, experts: tuple[Interval, ...], group: Any) -> None:
        """`experts`: the interval of each rank of the group."""
        super().__init__()
        self.inner, self.group = inner, group
        self.first = experts[dist.get_rank(group)][0]
        self._ends = torch.tensor([last for _, last in experts])

    def forward(self, x: Tensor, ids: Tensor, shares: Tensor, add: Tensor | None = None) -> Tensor:
        chosen = ids.flatten().long()
        to = torch.bucketize(chosen, self._ends.to(chosen.device), right=True)
        order = to.argsort(stable=True)
        sent = to.bincount(minlength=len(self._ends))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        out, back = received.tolist(), sent.tolist()
        rows = _exchange(x[order // ids.shape[1]], out, back, self.group)
        outputs = self._local_experts(rows, _exchange(chosen[order], out, back, self.group))
        returned = _exchange(outputs, back, out, self.group)
        found = torch.empty_like(returned).index_copy(0, order, returned).unflatten(0, ids.shape)
        total = (found * shares[..., None].to(found.dtype)).sum(1)
        return total if add is None else total + add

    def _local_experts(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """Without any row, a zero row is computed and dropped, so that every rank has gradients for its experts."""
        count = len(rows)
        if not count:
            rows, chosen = torch.cat((rows, rows.new_zeros(1, rows.shape[1]))), chosen.new_full((1,), self.first)
        ones = torch.ones(len(rows), 1, dtype=rows.dtype, device=rows.device)
        return self.inner(rows, chosen[:, None] - self.first, ones)[:count]


def _exchange(rows: Tensor, out: list[int], back: list[int], group: Any) -> Tensor:
    """`out` rows are received from each rank, `back` are sent to each."""
    if rows.requires_grad:
        found: Any = all_to_all_single_autograd(rows.contiguous(), out, back, group)
        return found.wait() if hasattr(found, "wait") else found
    found = rows.new_empty(sum(out), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), out, back, group=group)
    return found

"""Collective communication between ranks. Knows tensors and rank numbers, no model.

group.py            the interface of a process group, and the group of one rank
groups.py           the tp and pp groups of a rank
store.py            the key-value store for rendezvous; torch_store.py wraps it for torch.distributed
mesh.py             authenticated connections between all ranks of a group
shared_memory.py    memory that two ranks of one machine share
join.py             makes the groups of a rank: native links (runtime/kernels/cpu/links.py) or torch.distributed
processes.py        groups over torch.distributed (gloo, NCCL)
through_host.py     groups of GPU ranks that communicate through host memory
autograd.py         a group whose collectives are differentiable, for training
counters.py         bytes and seconds of every collective
close_listeners.py  stops listeners that gloo leaves open
"""

from windlass.runtime.parallel.group import Group, SoloGroup
from windlass.runtime.parallel.groups import SOLO, Groups, make_groups

__all__ = ["SOLO", "Group", "Groups", "SoloGroup", "make_groups"]

"""Ranks that talk: what they say to each other, not why. Knows tensors and numbers of ranks, no model.

group.py        what a group of ranks can do, and the group of one, which does nothing
groups.py       the groups that a rank of a layout is in
meeting.py      how ranks find each other: boards, and groups from a meeting
mesh.py         a proved connection between every two ranks
shared.py       memory that two ranks of one machine share
joining.py      which groups talk by links (kernels/cpu/links.py), which by torch.distributed
processes.py    groups of processes, over torch.distributed (gloo, NCCL)
board_store.py  a board as torch.distributed's Store
counted.py      bytes and seconds of every collective
shut.py         listeners of libraries that nobody is to be let in by any more
threads.py      groups of threads in one process, in the same words
"""

from windlass.parallel.group import Group, SoloGroup
from windlass.parallel.groups import SOLO, Groups, make_groups

__all__ = ["SOLO", "Group", "Groups", "SoloGroup", "make_groups"]

"""Training over many processes: data, tensor, pipeline and expert parallelism.

degrees.py   which layouts there are, and what to change in others
meshes.py    the device mesh and its groups
ranks.py     one rank of the mesh, as the trainer sees it
reduce.py    bucketed all-reduce of gradients
dispatch.py  all-to-all dispatch of tokens to expert-parallel ranks
stages.py    pipeline stages and their schedule (torch.distributed.pipelining)
"""

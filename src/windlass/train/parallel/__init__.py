"""One training run over many processes: who has which layers, slices, experts and samples, and what they sum.

meshes.py    the grid of ranks, and every group in it
ranks.py     a rank of the grid, as the trainer sees it (train.step.Alone is the rank that is alone)
dispatch.py  tokens to the ranks that have their experts, and back
stages.py    layers in stages, micro-batches through them (torch.distributed.pipelining)
"""

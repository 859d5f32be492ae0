"""Operations on any NVIDIA GPU from Ampere on, in Triton. Knows no model; knows nothing of kernels/cuda, which is for Hopper alone.

available.py  when these may be used; imports no triton
rows.py       packed weights as these kernels read them; plain PyTorch
tile.py       the one inner loop of all products: dequantize a tile of weights, multiply, add up
linear.py, experts.py (with dispatch.py), attention.py, qkv.py, latent.py, norm.py, activate.py, route.py, embed.py, heads.py
ops.py        all of them, under the names that kernels/*.py call them by

No operation here waits for the device: whatever the host must know it knows from shapes and from `step.counts`. Sums are made in a
fixed order. An operation that does not take its inputs returns None.
"""

"""Triton implementations for NVIDIA GPUs from Ampere on. Knows no model, and nothing of runtime/kernels/cuda, which is for Hopper alone.

available.py  when these may be used; imports no triton
tiles/        the inner loop of all products (dequantize a tile of weights, multiply, accumulate), and sorting rows by expert
ops.py        all operations by name
The other files have one operation each.

No operation synchronizes with the device: the host uses shapes and `step.counts` only. Sums are made in a fixed order. An operation that
does not support its inputs returns None.
"""

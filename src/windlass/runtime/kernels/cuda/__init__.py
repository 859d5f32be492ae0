"""CUDA C++ kernels for Hopper, over 4-bit weights in tiles (layout.py). Knows no model."""

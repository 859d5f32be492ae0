"""The decoder's forward pass in a few Hopper kernels per layer (runtime/kernels/cuda)."""

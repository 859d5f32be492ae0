"""The decoder's pass in a few Hopper kernels a layer (kernels/cuda)."""

"""What the Triton kernels share: tiles of packed weights, row dispatch, rotation, types."""

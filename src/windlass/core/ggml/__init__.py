"""ggml's block types: what files and kernels both need to know of them. No torch."""

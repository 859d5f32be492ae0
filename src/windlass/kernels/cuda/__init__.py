"""Operations on NVIDIA GPUs: 4-bit weights in a layout of their own, decode kernels in CUDA C++, prefill kernels in Triton. Knows no model."""

"""Operations on tensors, one per file: each dispatches to CPU, Triton or plain PyTorch. Knows no model.

ops/       the operations: dispatch and PyTorch reference
cpu/       C++ implementations (native/), and native collectives between ranks
triton/    Triton implementations for NVIDIA GPUs
cuda/      CUDA kernels for Hopper, which fuse whole half layers
packing/   quantized weights: quantization and memory layouts
program/   recording a model's native operations once and replaying them
step.py    the tensors of one forward pass, and the paged KV cache; arguments.py: arguments of operations
"""

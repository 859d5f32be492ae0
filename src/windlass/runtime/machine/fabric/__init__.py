"""The network between machines: what is there, and the environment variables of NCCL, gloo, PyTorch and CUDA that fit it."""

"""GGUF, Distributed Llama and in-memory tensors as a TensorStore."""

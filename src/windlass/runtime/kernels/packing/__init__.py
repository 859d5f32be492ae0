"""Quantized weights: quantization, memory layouts for the CPU (panels) and GPUs (packed rows), conversion from other formats."""

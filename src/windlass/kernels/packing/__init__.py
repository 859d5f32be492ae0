"""Quantized weights: packing, the CPU's panel layout, repacking of other formats."""

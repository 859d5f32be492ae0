"""Weights that travel: which slices a rank needs, sending them, and the worker's cache of them."""

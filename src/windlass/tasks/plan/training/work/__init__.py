"""Layers as lists of operations: FLOPs, traffic and kept activations."""

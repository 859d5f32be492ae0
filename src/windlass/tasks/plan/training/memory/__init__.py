"""Bytes per device: states and activations."""

"""Experts in host memory beside a GPU: pinned memory, slots of device memory, and the CPU's share of the work."""

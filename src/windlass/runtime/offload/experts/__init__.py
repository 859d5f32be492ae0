"""Routed experts: which are in memory, which make room, and the computation over those that are there."""

"""Verdicts on one machine: GPUs, limits, packages, disks. Pure."""

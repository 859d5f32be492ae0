"""Probes this machine: GPUs, cores, memory, disk, memory bandwidth. The one reader of process and system memory."""

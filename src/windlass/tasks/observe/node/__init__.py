"""The exporter of a machine: GPUs under DCGM's names, the host under node_exporter's, energy counters."""

"""What a machine says of its own health: GPUs through NVML, the kernel's log, limits and clocks. Reads only; judges nothing."""

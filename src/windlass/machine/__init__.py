"""What this machine is: its GPUs, cores, memory, disk and memory speed."""

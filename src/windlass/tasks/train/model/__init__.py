"""The decoder for training: losses, packed rows, initial weights, LoRA, expert load balancing."""

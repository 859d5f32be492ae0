"""The decoder with gradients: losses, packed rows, initial weights, LoRA, expert load balancing."""

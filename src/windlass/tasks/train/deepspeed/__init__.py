"""Training with DeepSpeed ZeRO."""

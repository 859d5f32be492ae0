"""Training on DeepSpeed's ZeRO."""

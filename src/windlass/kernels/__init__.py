"""Fast operations on tensors, one to a file: the operation chooses, its reference is plain PyTorch. Knows no model."""

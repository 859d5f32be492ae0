"""A decoder's tensors from a checkpoint, a dictionary or random numbers."""

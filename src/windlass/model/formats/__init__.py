"""Files as they are: checkpoints on disk and on the hub. Knows tensors' names and bytes, not what a model does with them."""

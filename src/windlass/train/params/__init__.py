"""Which tensors lie where in a rank's parameters, and their shards in a checkpoint."""

"""How a rank's parameters map to our tensors, and their shards in a checkpoint."""

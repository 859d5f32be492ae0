"""`windlass convert`."""

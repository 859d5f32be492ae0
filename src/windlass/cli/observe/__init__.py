"""`windlass observe`."""

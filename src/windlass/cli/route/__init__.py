"""`windlass route`."""

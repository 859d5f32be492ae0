"""`windlass top`."""

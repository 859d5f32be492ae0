"""`windlass models`."""

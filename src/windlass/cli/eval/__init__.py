"""`windlass eval`."""

"""`windlass setup`."""

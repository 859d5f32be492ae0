"""`windlass serve`."""

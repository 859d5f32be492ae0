"""`windlass train`."""

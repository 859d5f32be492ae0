"""`windlass bench --served`."""

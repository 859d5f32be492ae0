"""`windlass bench`."""

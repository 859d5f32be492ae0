"""`windlass plan`."""

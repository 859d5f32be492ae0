"""Statistics that reports share."""

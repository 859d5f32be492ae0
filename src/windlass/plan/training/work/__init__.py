"""What the layers compute and keep, as operations."""

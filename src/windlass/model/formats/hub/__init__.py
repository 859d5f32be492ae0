"""The model hub and models on this disk."""

"""Weight transfer: which slices a rank needs, sending them, and the worker's cache."""

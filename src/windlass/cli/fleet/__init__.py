"""`windlass worker` and `windlass launch`."""

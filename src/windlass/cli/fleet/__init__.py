"""`windlass worker` and `windlass launch`, and the options of every command that splits a model."""

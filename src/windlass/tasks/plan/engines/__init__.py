"""Inference engines as data: what each can do and how close to the roofline it runs. One TOML each, every number with its source."""

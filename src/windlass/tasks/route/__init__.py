"""Routing between models: which one answers a prompt, decided before and after it has answered. Torch-free; needs numpy."""

"""Training: the same decoder with gradients, on as many devices as there are. The recipe comes ready made; nothing here reads TOML."""

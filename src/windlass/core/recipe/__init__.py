"""A training recipe: what to train, on what and how."""

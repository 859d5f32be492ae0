"""The training loop: trainer state, guard, restarts."""

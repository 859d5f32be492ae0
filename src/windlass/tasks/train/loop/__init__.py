"""The training loop: trainers, loss guard, restarts."""

"""One model over several ranks: their processes, the connection to their supervisor, and the step broadcast of rank 0."""

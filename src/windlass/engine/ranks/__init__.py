"""One model over several ranks: the processes, the connection to their supervisor, steps broadcast by the first."""

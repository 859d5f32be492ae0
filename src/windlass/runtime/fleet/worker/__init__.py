"""The worker's side of a fleet: a session with one root at a time, its rank processes, weights received."""

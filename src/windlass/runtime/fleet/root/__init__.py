"""The root: connections to workers, one epoch after another, and the transport to the engine."""

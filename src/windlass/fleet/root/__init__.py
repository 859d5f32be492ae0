"""The root's side of a fleet: its members, one epoch after another, and the way to the engine."""

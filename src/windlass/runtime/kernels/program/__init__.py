"""Recording native operations once and replaying them without Python."""

"""`windlass top`: what is shown, as a pure function of what was read."""

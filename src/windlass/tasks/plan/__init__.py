"""Memory, speed, cost and layout, worked out before anything starts. No torch."""

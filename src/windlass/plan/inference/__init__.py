"""The search over engines, schemes, layouts and tiers, and the Plan that comes of it."""

"""The search over engines, schemes, layouts and memory tiers that makes an inference plan."""

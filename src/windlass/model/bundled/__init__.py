"""Shipped with the package: a small trained model, and the generated tasks it was trained on. No torch."""

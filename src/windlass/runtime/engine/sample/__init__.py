"""Logits to the next tokens: masks, penalties, filters, grammars, seeded random numbers."""

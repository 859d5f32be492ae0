"""A prompt as numbers: hashed n-grams and counts."""

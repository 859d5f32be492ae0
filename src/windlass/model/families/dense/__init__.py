"""Dense families, one file each."""

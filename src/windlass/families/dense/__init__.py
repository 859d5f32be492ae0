"""Families whose feed-forwards are dense, one file each."""

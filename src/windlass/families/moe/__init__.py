"""Families with mixtures of experts, one file each."""

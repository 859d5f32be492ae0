"""Implementations of core.ports.Weights: a checkpoint, a state_dict, random weights."""

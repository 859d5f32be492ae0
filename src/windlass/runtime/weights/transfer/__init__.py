"""Sending parts of a checkpoint to other machines. No torch until weights are read."""

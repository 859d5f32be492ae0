"""Runs the decoder on the scheduled tokens: step buffers, CUDA graphs, the logits that are wanted."""

"""Runs the decoder on the scheduled tokens: step buffers, CUDA graphs, top logits."""

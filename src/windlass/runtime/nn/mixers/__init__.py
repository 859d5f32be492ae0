"""Attention and latent attention, and the positions they use."""

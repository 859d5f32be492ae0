"""Matrices that every step reads, in a fixed order: a ring of buffers that is filled ahead."""

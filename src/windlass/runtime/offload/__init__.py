"""Models larger than memory: weights that live on disk and are read while the model runs.

placement.py  what a rank may use, and where its weights go (core/tiers decides)
weights.py    the source of weights that a decoder is built from, with some of them on disk
tiers/        the file on disk, and direct reads from it
stream/       matrices that are read every step, ahead of their use
experts/      the cache of whole experts, and computing with those that are in it
"""

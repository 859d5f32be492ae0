"""The one decoder and its parts: a ModelSpec and a source of weights in, logits out. Knows no files, no requests, no text.

decoder.py      token in, logits out: embedding, layers, norm, head
layer.py        how a layer's two halves are wired
attention.py    mixers: heads over keys and values ...
latent.py       ... or over one latent per token
feed_forward.py dense ...
moe.py          ... or routed over experts
linear.py       a matrix with its bias; norm.py, positions.py: what the names say
"""

from windlass.nn.decoder import Decoder

__all__ = ["Decoder"]

"""The one decoder and its parts: a ModelSpec and a source of weights in, logits out. Knows no files, no requests, no text.

decoder.py      token in, logits out: embedding, layers, norm, head
layer.py        how a layer's two halves are wired
attention.py    mixers: heads over keys and values ...
latent.py       ... or over one latent per token
feed_forward.py dense ...
moe.py          ... or routed over experts
linear.py       a matrix with its bias; norm.py, positions.py: what the names say
shard.py        which part of all this a rank is; sums.py, vocabulary.py, stage.py: what ranks then say to each other
"""

from windlass.nn.decoder import Decoder
from windlass.nn.parallel.shard import Shard

__all__ = ["Decoder", "Shard"]

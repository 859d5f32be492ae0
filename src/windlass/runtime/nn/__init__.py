"""The decoder and its modules, built from a ModelSpec and a source of weights. Knows no files, no requests, no text.

decoder.py       tokens in, logits out: embedding, layers, final norm, head
layer.py         a layer: mixer and feed-forward with their norms and residuals
mixers/          attention (MHA, GQA, MQA), latent attention (MLA), position embeddings
feed_forward.py  the dense feed-forward; moe.py: the mixture of experts
linear.py, norm.py
parallel/        which shard of the model a rank holds, and its collectives: sums, vocabulary, pipeline stages
fused/           the forward pass by runtime/kernels/cuda, on Hopper
"""

from windlass.runtime.nn.decoder import Decoder
from windlass.runtime.nn.parallel.shard import ModelShard

__all__ = ["Decoder", "ModelShard"]

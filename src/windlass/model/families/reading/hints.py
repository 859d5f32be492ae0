"""What a checkpoint's tensor names say that its config does not, or says wrongly.

INTELLECT-3.1's config claims an MTP layer that the checkpoint does not have; GLM-4.6's checkpoint lacks two tensors of GLM-4.5 with
an equal config. So the names decide where they are known, otherwise the registry.
"""

from __future__ import annotations

from collections.abc import Collection

from windlass.core.model import Frozen


class Hints(Frozen):
    next_token_layer: bool | None = None
    """None: the config decides."""
    own_next_token_embeddings: bool | None = None
    """None: the family's default."""
    head_copy: bool | None = None


def hints_from(tensor_names: Collection[str], num_layers: int) -> Hints:
    """Empty hints without names: the config then decides."""
    if not tensor_names:
        return Hints()
    prefix = f"model.layers.{num_layers}."
    return Hints(
        # A quantized checkpoint stores eh_proj under other names.
        next_token_layer=f"{prefix}eh_proj.weight" in tensor_names or f"{prefix}eh_proj.weight_packed" in tensor_names,
        own_next_token_embeddings=f"{prefix}embed_tokens.weight" in tensor_names,
        head_copy="lm_head.weight" in tensor_names,
    )

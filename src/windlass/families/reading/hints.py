"""What a checkpoint's own tensor names say that its config does not, or says wrongly.

INTELLECT-3.1's config claims an MTP layer whose weights are absent; GLM-4.6's omits two tensors that GLM-4.5's has; the
configs are otherwise equal. So presence is decided by names where they are known, and by the registry's note where not.
"""

from __future__ import annotations

from collections.abc import Collection

from windlass.core.model import Frozen


class Hints(Frozen):
    next_token_layer: bool | None = None
    """None: as the config says."""
    own_next_token_embeddings: bool | None = None
    """None: as the family usually does."""
    head_copy: bool | None = None


def hints_from(tensor_names: Collection[str], num_layers: int) -> Hints:
    """Nothing is known where there are no names: the config then decides."""
    if not tensor_names:
        return Hints()
    prefix = f"model.layers.{num_layers}."
    return Hints(
        next_token_layer=f"{prefix}eh_proj.weight" in tensor_names,
        own_next_token_embeddings=f"{prefix}embed_tokens.weight" in tensor_names,
        head_copy="lm_head.weight" in tensor_names,
    )

"""Weights in two types: 16 bits to compute with, fp32 to learn in. For ranks whose parameters are plain tensors; FSDP casts by itself.

Matrices of the model become 16-bit; each has a master in fp32, which alone the optimizer sees. What a micro-batch leaves as a 16-bit
gradient is added to the master's at once and dropped, so gradients too are summed in fp32. 2 + 4 + 4 bytes a number.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from windlass.kernels.torch_compile import chain

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _add_to(total: Tensor, part: Tensor) -> None:
    total += part


add_to = chain(_add_to, dynamic=True)
"""PyTorch's own kernel for a sum of unlike types reaches 2.4 of an H200's 4.4 TB/s, and every micro-batch passes all gradients through it."""


class Masters:
    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Where `dtype` is what the model has already, every parameter is its own master."""
        self.of: dict[str, Tensor] = {}
        """By the parameter's name in the model, what the optimizer moves."""
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            self.of[name] = self._master(parameter, dtype) if is_computed_in(name, parameter, dtype) else parameter

    def _master(self, parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        master = nn.Parameter(parameter.data)
        parameter.data = master.detach().to(dtype)
        self._pairs.append((parameter, master))

        def take(moved: Tensor) -> None:
            if master.grad is None:
                master.grad = moved.grad.to(master.dtype)
            else:
                add_to(master.grad.view(-1), moved.grad.reshape(-1))
            moved.grad = None

        parameter.register_post_accumulate_grad_hook(take)
        return master

    @torch.no_grad()
    def refresh(self) -> None:
        """The model's own weights, once the masters have moved."""
        if self._pairs:
            torch._foreach_copy_([parameter for parameter, _ in self._pairs], [master for _, master in self._pairs])


def is_computed_in(name: str, parameter: Tensor, dtype: torch.dtype) -> bool:
    """Vectors are small, and routers decide between scores that are close: both stay as they are."""
    return parameter.dtype != dtype and parameter.dim() > 1 and not name.endswith("router.weight")

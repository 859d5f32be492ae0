"""Mixed precision with fp32 master weights, for plain-tensor parameters; FSDP casts by itself.

The model's matrices become 16-bit; each has an fp32 master, which the optimizer updates. The 16-bit gradient of a micro-batch is added to
the master's fp32 gradient at once and freed, so gradients are accumulated in fp32. 2 + 4 + 4 bytes per parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from windlass.runtime.kernels.torch_compile import chain

COMPUTE_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _add_to(total: Tensor, part: Tensor) -> None:
    total += part


add_to = chain(_add_to, dynamic=True)
"""Compiled: PyTorch's kernel for adding mixed types reaches 2.4 of an H200's 4.4 TB/s, and every micro-batch adds all gradients."""


class MasterWeights:
    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """If the model already has this `dtype`, every parameter is its own master."""
        self.of: dict[str, Tensor] = {}
        """The optimizer's parameters, by their name in the model."""
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            self.of[name] = self._master(parameter, dtype) if needs_master(name, parameter, dtype) else parameter

    def _master(self, parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        master = nn.Parameter(parameter.data)
        parameter.data = master.detach().to(dtype)
        self._pairs.append((parameter, master))

        def take(moved: Tensor) -> None:
            assert moved.grad is not None
            if master.grad is None:
                master.grad = moved.grad.to(master.dtype)
            else:
                add_to(master.grad.view(-1), moved.grad.reshape(-1))
            moved.grad = None

        parameter.register_post_accumulate_grad_hook(take)
        return master

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies the updated masters to the model."""
        if self._pairs:
            torch._foreach_copy_([parameter for parameter, _ in self._pairs], [master for _, master in self._pairs])


def needs_master(name: str, parameter: Tensor, dtype: torch.dtype) -> bool:
    """Matrices except routers: vectors are small, and routing decides between close scores."""
    return parameter.dtype != dtype and parameter.dim() > 1 and not name.endswith("router.weight")

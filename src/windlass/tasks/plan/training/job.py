"""One training configuration with every degree set. A plain value: memory and time are computed elsewhere."""

from __future__ import annotations

from windlass.core.layout import TrainingGroups
from windlass.core.model import Frozen
from windlass.core.recipe.sections import (
    Compute,
    Dispatch,
    Framework,
    GradientType,
    LoraSection,
    LossKind,
    Offload,
    OptimizerName,
    OverlapSection,
    Recompute,
    Schedule,
    StateType,
)


class TrainingJob(Frozen):
    groups: TrainingGroups
    sequence_tokens: int
    global_batch: int
    """Sequences per optimizer step, over all ranks."""
    micro_batch: int
    """Sequences per forward pass of one rank."""
    virtual_stages: int = 1
    schedule: Schedule = "1f1b"
    zero: int = 1
    sequence_parallel: bool = True
    recompute: Recompute = "none"
    flash_attention: bool = True
    offload: Offload = "none"
    compute: Compute = "bf16"
    gradients: GradientType = "fp32"
    optimizer: OptimizerName = "adamw"
    overlap: OverlapSection = OverlapSection()
    dispatch: Dispatch = "all_to_all"
    accumulates_apart: bool = False
    """Gradients are accumulated by separate kernels, not fused into the weight-gradient matmul."""
    next_token: bool = False
    """Also trains the multi-token-prediction (MTP) layer."""
    lora: LoraSection = LoraSection()
    """With a rank set, only adapters are trained."""
    framework: Framework = "megatron"
    """Never `auto`."""
    compile: bool = False
    """Chains of small operations are fused (torch.compile)."""
    loss: LossKind = "fused"
    """Never `auto`."""
    states: StateType = "fp32"
    """Optimizer states; 16 and 8 bits go without fp32 weights."""
    kept_products: float = 0.5
    """Share of products whose outputs recomputation per operation keeps."""
    shards: int | None = None
    """ZeRO-3 shards dense weights over this many ranks and keeps copies of them (hybrid sharding); None: over all."""

    @property
    def num_micro_batches(self) -> int:
        return self.global_batch // (self.groups.dp * self.micro_batch)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence_tokens

    @property
    def dense_shards(self) -> int:
        """Ranks over which ZeRO spreads the states of dense tensors."""
        ranks = self.groups.dp * self.groups.cp
        return min(self.shards or ranks, ranks)

    @property
    def expert_shards(self) -> int:
        return min(self.shards or self.groups.expert_dp, self.groups.expert_dp)

    @property
    def micro_tokens(self) -> float:
        """Tokens of a micro-batch on one rank: context parallelism splits the sequence."""
        return self.micro_batch * self.sequence_tokens / self.groups.cp

    @property
    def outside_tokens(self) -> float:
        """Tokens per rank between the tensor-parallel regions (norms, dropout, residual): 1/tp with sequence parallelism, all of
        them without (arXiv 2205.05198, 4.2.2)."""
        return self.micro_tokens / self.groups.tp if self.sequence_parallel else self.micro_tokens

    @property
    def input_tokens(self) -> float:
        """Tokens whose layer inputs a tensor-parallel rank keeps: Megatron keeps its share and gathers again, PyTorch's sequence
        parallelism keeps what was gathered."""
        return self.micro_tokens if self.framework == "pytorch" else self.outside_tokens

    @property
    def expert_rows(self) -> float:
        """Rows that reach one rank's experts with even routing, divided by top-k: ranks that share an expert (expert_tp) see
        each other's tokens."""
        return self.micro_tokens / self.groups.tp * self.groups.expert_tp

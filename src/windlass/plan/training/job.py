"""One training run with every degree decided. A pure value; whether it fits, works or is fast is asked elsewhere."""

from __future__ import annotations

from windlass.core.layout import TrainingGroups
from windlass.core.model import Frozen
from windlass.core.recipe.recipe import Compute, Dispatch, GradientType, Offload, OverlapSection, Recompute, Schedule
from windlass.core.recipe.sections import LoraSection, OptimizerName


class TrainingJob(Frozen):
    groups: TrainingGroups
    sequence_tokens: int
    global_batch: int
    """Sequences of one optimizer step, all ranks together."""
    micro_batch: int
    """Sequences that go through the pipeline at once."""
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
    """Gradients of micro-batches are added up by passes of their own, not by the products that make them."""
    next_token: bool = False
    """The multi-token-prediction layer is trained too."""
    lora: LoraSection = LoraSection()
    """With a rank, adapters learn and everything else is frozen."""

    @property
    def num_micro_batches(self) -> int:
        return self.global_batch // (self.groups.dp * self.micro_batch)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence_tokens

    @property
    def micro_tokens(self) -> float:
        """Tokens of a micro-batch on one rank: context parallelism cuts the sequence."""
        return self.micro_batch * self.sequence_tokens / self.groups.cp

    @property
    def outside_tokens(self) -> float:
        """Tokens a rank holds between the tensor-parallel regions (norms, dropout, residual): a share with sequence
        parallelism, all of them without (arXiv 2205.05198, 4.2.2)."""
        return self.micro_tokens / self.groups.tp if self.sequence_parallel else self.micro_tokens

    @property
    def expert_rows(self) -> float:
        """Tokens times choices that reach one rank's experts when routing is even, per expert a token chooses: every rank of
        the expert grid brings its share of the tokens, and the ranks that share an expert see one another's."""
        return self.micro_tokens / self.groups.tp * self.groups.expert_tp

"""The sections of a recipe: plain values."""

from __future__ import annotations

from typing import Any, Literal

from windlass.core.model import Frozen

Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "cpu", "nvme"]
Compute = Literal["bf16", "fp16", "fp32", "fp8"]
GradientType = Literal["fp32", "bf16", "fp16"]
Schedule = Literal["1f1b", "zero_bubble", "dualpipe"]
TensorOverlap = Literal["none", "backward", "all"]
Dispatch = Literal["all_to_all", "per_node"]
Packing = Literal["cut", "whole"]
Start = Literal["random", "weights"]

Framework = Literal["auto", "pytorch", "megatron", "deepspeed"]
LossKind = Literal["auto", "whole", "fused", "chunked"]
StateType = Literal["fp32", "bf16", "int8"]

Degree = int | None


class ModelSection(Frozen):
    """Exactly one of `name` (registry or hub), `path` (a folder or config.json) and `config` (the table itself)."""

    name: str | None = None
    path: str | None = None
    config: dict[str, Any] | None = None
    mtp: bool = False
    """Also train the multi-token-prediction (MTP) layer, if the model has one."""
    start: Start = "random"
    """`weights`: start from the weights of the name or path (continued training, fine-tuning) instead of random ones."""
    dropout: bool | None = None
    """Overrides the config."""


class HardwareSection(Frozen):
    on: str | None = None
    """As for `windlass plan --on`: `128x(8xH100-80GB)@400Gb`."""


class DataSource(Frozen):
    """Token shards made by `windlass train data`."""

    path: str
    """Their directory, relative to the recipe."""
    weight: float | None = None
    """Sampling weight relative to the other sources; without weights every source is read once per epoch."""


class DataSection(Frozen):
    tokens: int | None = None
    sequence_length: int | None = None
    allow_longer_context: bool = False
    """Allow sequences longer than the model's context, to extend it."""
    sources: tuple[DataSource, ...] = ()
    packing: Packing = "cut"
    """How documents are packed into rows: `cut` splits a document at the end of a row; `whole` starts the next row with it instead."""
    seed: int = 0
    """Seed of the sample order. The same seed and shards give the same samples with any number of processes."""


class BatchSection(Frozen):
    """Batch of one optimizer step, in sequences (exact) or in tokens (rounded to what the layout can divide).

    Gradients are accumulated over global_batch / (data-parallel ranks * micro_batch) micro-batches.
    """

    global_batch: int | None = None
    tokens: int | None = None
    micro_batch: int | None = None


class ParallelSection(Frozen):
    tp: Degree = None
    cp: Degree = None
    pp: Degree = None
    ep: Degree = None
    expert_tp: Degree = None
    virtual_stages: Degree = None
    """Chunks of layers per pipeline rank (interleaved schedule); 1 is the plain schedule."""
    fsdp: Degree = None
    """Data-parallel ranks over which FSDP shards parameters, gradients and optimizer states: all of them, or 1 for none.
    With expert parallelism also data-parallel ranks / ep."""
    zero: int | None = None
    """ZeRO stage over the data-parallel ranks: 0 none, 1 optimizer states, 2 also gradients, 3 also parameters."""
    sequence_parallel: bool | None = None
    schedule: Schedule = "1f1b"
    dispatch: Dispatch = "all_to_all"
    """`per_node`: a token is sent to each node once, however many of its experts are there (DeepEP, HybridEP)."""


class OverlapSection(Frozen):
    """Which communication is overlapped with computation."""

    tp: TensorOverlap = "backward"
    """`backward`: gradient collectives overlap with the other gradient's matmul (Megatron-Core's linear layer);
    `all`: collectives are also split and pipelined with the matmuls (Transformer Engine user buffers, async TP)."""
    pp: bool = True
    dp: bool = True
    ep: bool = False


class MemorySection(Frozen):
    recompute: Recompute | None = None
    flash_attention: bool = True
    offload: Offload = "none"


class PrecisionSection(Frozen):
    compute: Compute = "bf16"
    gradients: GradientType = "fp32"


class AssumeSection(Frozen):
    """What the planner assumes of the program that trains. For planning only: `windlass train` is what it is."""

    framework: Framework = "auto"
    """Whose efficiency: `pytorch` (FSDP2: torchtitan, llm-foundry, TRL, and `windlass train`), `megatron` (Megatron-Core, NeMo),
    `deepspeed`. auto: deepspeed if that is run.engine, megatron if tp or pp is pinned, else pytorch."""
    loss: LossKind = "auto"
    """`whole`: logits in 16 bits, their log-softmax and its gradient in fp32, and the gradient in 16 bits; `fused`: in place (Megatron,
    Liger, a compiled loss); `chunked`: logits of a part of the tokens at a time (torchtune, TRL)."""
    states: StateType = "fp32"
    """Optimizer states. `bf16` and `int8` also mean that there are no fp32 weights beside the 16-bit ones."""
    kept_products: float = 0.5
    """Share of matrix products whose output selective recomputation keeps: torchtitan every second, `windlass train` all (1)."""


class CheckpointSection(Frozen):
    interval_minutes: float | None = None
    """None: the Young-Daly interval, but not below the planner's minimum."""
    interval_steps: int | None = None
    """Also save every N steps."""
    keep: int = 3
    """Keep the last N checkpoints."""
    milestone_steps: int | None = None
    """Checkpoints at multiples of this many steps are kept forever."""
    local: str | None = None
    """A local disk of each node, written first; parts are then copied to the run's folder, verified, and removed from the disk."""
    fallback: str | None = None
    """A second folder for this run's checkpoints, on another disk and relative to the recipe, for what cannot be written to the run's folder."""
    bandwidth: float | None = None
    """Aggregate write bandwidth of all ranks to the shared store, bytes per second, or as text: "200GB"."""
    asynchronous: bool = True
    """Training waits only for the copy to host memory."""
    restart_minutes: float = 10.0
    """From a failure to the first step after the restart."""


# --- read by the trainer

ScheduleName = Literal["constant", "cosine", "wsd", "linear"]
OptimizerName = Literal["adamw", "muon", "sgd"]
EngineName = Literal["torch", "deepspeed"]
LoraTarget = Literal["attention", "feed_forward", "experts"]
LoraBase = Literal["bf16", "int8", "int4"]


class OptimizerSection(Frozen):
    name: OptimizerName = "adamw"
    """`muon`: Muon for matrices, AdamW for the rest (embeddings, head, norms, biases, routers)."""
    lr: float = 3e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW betas (arXiv 2412.19437, 4.2, and others)."""
    eps: float = 1e-8
    weight_decay: float = 0.1
    """For matrices; vectors and embeddings do not decay."""
    clip: float | None = 1.0
    """Maximum global gradient norm; None: no clipping."""
    momentum: float = 0.95
    """Momentum of `muon` and `sgd`."""
    newton_schulz_steps: int = 5
    """Newton-Schulz iterations of Muon (github.com/KellerJordan/Muon)."""


class ScheduleSection(Frozen):
    """Learning-rate schedule: linear warmup for `warmup_steps`, then `name`, down to `final` of the peak."""

    name: ScheduleName = "cosine"
    steps: int | None = None
    """Total optimizer steps; None: derived from `data.tokens`."""
    warmup_steps: int = 0
    decay_steps: int | None = None
    """For `wsd` only: length of the final decay (arXiv 2404.06395, 4.2); default: a tenth of all steps."""
    final: float = 0.1
    """Final learning rate, as a fraction of the peak."""


class LossSection(Frozen):
    """Auxiliary losses and the router bias update. Defaults after GLM-4.5's report (arXiv 2508.06471, 2.3)."""

    mtp: float = 0.3
    """Weight of the multi-token-prediction loss, with `model.mtp`."""
    z: float = 0.0
    """Weight of the z-loss of the output logits (arXiv 2204.02311, 5)."""
    router_z: float = 0.0
    """Weight of the router z-loss (arXiv 2202.08906, 3.2)."""
    balance: float = 1e-4
    """Weight of the sequence-wise balance loss (arXiv 2412.19437, 2.1.2)."""
    bias_rate: float = 1e-3
    """Update rate of the router's correction bias, if it has one (arXiv 2408.15664); 0: no update."""


class LoraSection(Frozen):
    """LoRA adapters on frozen weights (arXiv 2106.09685)."""

    rank: int | None = None
    """None: no LoRA, all weights are trained."""
    alpha: float = 32.0
    """Adapter outputs are scaled by alpha / rank."""
    targets: tuple[LoraTarget, ...] = ("attention",)
    """`feed_forward`: dense feed-forwards and shared experts."""
    base: LoraBase = "bf16"
    """Storage of the frozen weights, for planning; a run uses them as stored in the model's files."""


class ValidationSection(Frozen):
    interval_steps: int | None = None
    """None: never."""
    samples: int = 64
    """Held-out rows per validation."""


class GuardSection(Frozen):
    """Loss-spike guard: on a bad step the run rolls back to its last checkpoint and skips that step's samples."""

    spike: float = 8.0
    """Maximum robust z-score of the loss against recent steps; 0: only NaN and infinity are bad."""
    window: int = 64
    """Recent steps to compare with."""
    rollbacks: int = 8
    """Maximum consecutive rollbacks before the run fails."""


class RunSection(Frozen):
    """Engine, compilation, seed and output folder."""

    engine: EngineName = "torch"
    deepspeed: str | None = None
    """DeepSpeed JSON config, relative to the recipe."""
    compile: bool = False
    """Fuse small chains of operations with torch.compile. Useful on GPUs."""
    seed: int = 0
    """Seed of the initial weights. `data.seed` is for the sample order."""
    folder: str | None = None
    """Directory of checkpoints and logs, relative to the recipe; default: `<recipe>-run` beside it."""

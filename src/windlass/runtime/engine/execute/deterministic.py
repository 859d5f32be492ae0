"""What `--deterministic` asks of a device, a runner and a decoder: that a row gets the same bits whatever else is in a step.

On a CPU the recorded operations promise that (runtime/kernels/program, `batch_invariant`); how prompts are cut, what is found in the cache, drafts
and preemption then change nothing either. What computes outside of them promises nothing, and is refused.
"""

from __future__ import annotations

from typing import Any

from windlass.core.launch import not_deterministic_on
from windlass.errors import Impossible
from windlass.runtime.engine.execute.runner import Runner
from windlass.runtime.kernels.packing.tiered import TieredExperts
from windlass.runtime.kernels.program import program


def check_deterministic(device: str) -> None:
    """Before anything is read."""
    if device != "cpu":
        raise not_deterministic_on(device)
    if not program.available():
        raise Impossible(
            "--deterministic needs the compiled kernels, which are not there: PyTorch's products depend on the number of rows; install a "
            "C++ compiler (`windlass check` says what is missing), or leave it out"
        )


def check_order_is_fixed(runner: Runner, decoder: Any) -> None:
    if runner.program is None:
        raise Impossible(
            f"--deterministic: this model is not computed by the compiled kernels alone ({runner.why_not_recorded}); leave it out, or "
            "convert the model to another form"
        )
    group = decoder.shard.groups.tp
    if group.size > 1 and not group.is_native:
        raise Impossible(
            "--deterministic needs native links between the ranks: gloo adds their parts in another order for another number of rows; leave "
            "one of them out"
        )
    if any(isinstance(getattr(part, "gate_up", None), TieredExperts) for part in decoder.modules()):
        raise Impossible(
            "--deterministic needs all experts in memory: those that are there are added before those that are read from disk, and which "
            "those are depends on other requests; raise --host-memory, or leave it out"
        )

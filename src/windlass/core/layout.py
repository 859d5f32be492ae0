"""Degrees of parallelism. Pure arithmetic; what an engine accepts is checked by `plan`.

tp  tensor parallelism: ranks that share every layer of a stage (heads, channels, vocabulary)
pp  pipeline parallelism: stages of consecutive layers
dp  data parallelism: copies of the model (inference: replicas; training: the batch is split over them)
ep  expert parallelism: ranks the routed experts are spread over. Not a further factor: these are the tp (and in training dp)
    ranks again, so world = tp * pp * dp (* cp), and ep divides tp * dp * cp (Megatron-Core parallel_state, torchtitan parallel_dims).
"""

from __future__ import annotations

from windlass.core.model import Frozen
from windlass.errors import Impossible


class Layout(Frozen):
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def expert_tp(self) -> int:
        """Ranks that share one expert, for experts spread within a tp group."""
        return max(self.tp // self.ep, 1)

    def __str__(self) -> str:
        parts = [
            f"{name}={degree}"
            for name, degree in (("tp", self.tp), ("pp", self.pp), ("ep", self.ep), ("dp", self.dp))
            if degree > 1
        ]
        return " ".join(parts) or "one device"


class RankCoordinates(Frozen):
    tp: int
    pp: int
    dp: int


def coordinates(layout: Layout, rank: int) -> RankCoordinates:
    """tp varies fastest, so that the ranks that communicate most are on one node; then pp, then dp."""
    return RankCoordinates(tp=rank % layout.tp, pp=rank // layout.tp % layout.pp, dp=rank // (layout.tp * layout.pp))


class TrainingGroups(Frozen):
    """Both process grids of a training job: tp * cp * pp * dp for dense layers, etp * ep * pp * edp for experts."""

    tp: int
    cp: int
    pp: int
    dp: int
    ep: int
    expert_tp: int
    expert_dp: int

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.pp * self.dp


def training_groups(world: int, *, tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1, expert_tp: int = 1) -> TrainingGroups:
    """The dp and expert-dp that result from arranging `world` ranks so; refuses sizes that do not divide.

    world = tp * cp * pp * dp = etp * ep * pp * edp (Megatron-Core `initialize_model_parallel`; its guide's TP*PP*CP*EP*DP is wrong).
    """
    dense, expert = tp * cp * pp, expert_tp * ep * pp
    if world % dense:
        raise Impossible(
            f"{world} devices cannot be arranged as tp {tp} x cp {cp} x pp {pp}: {world} is not a multiple of {dense}"
        )
    if world % expert:
        raise Impossible(
            f"ep {ep} does not fit: expert ranks are the tp, cp and dp ranks again, so {world} devices must be a multiple of"
            f" expert_tp {expert_tp} x ep {ep} x pp {pp} = {expert}; at this tp, cp and pp, ep may be a divisor of {world // pp // expert_tp}"
        )
    return TrainingGroups(tp=tp, cp=cp, pp=pp, dp=world // dense, ep=ep, expert_tp=expert_tp, expert_dp=world // expert)

"""The degrees of parallelism and how they multiply. Pure arithmetic; what an engine accepts is `plan.feasible`'s business.

tp  ranks that share every layer of a stage (heads, channels, vocabulary)
pp  stages of consecutive layers
dp  copies of the whole (inference: replicas; training: the batch is split over them)
ep  ranks the routed experts are spread over. Not a further factor: expert ranks are the tp (and in training dp) ranks
    again, so world = tp * pp * dp (* cp), and ep divides tp * dp * cp (Megatron-Core parallel_state, torchtitan parallel_dims).
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
        """Ranks that share one expert when the experts are spread within a tp group."""
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
    """tp runs fastest, so that the ranks that talk most sit in one node; then pp, then dp."""
    return RankCoordinates(tp=rank % layout.tp, pp=rank // layout.tp % layout.pp, dp=rank // (layout.tp * layout.pp))


class TrainingGroups(Frozen):
    """Both grids of an n-D training job: dense layers see tp * cp * pp * dp, experts etp * ep * pp * edp."""

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
    """dp and expert-dp that are left over when `world` ranks are arranged so; refuses what does not divide.

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

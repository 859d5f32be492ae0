"""From `--speculate` to what drafts: which of lookup, MTP layer and model, and their caches and runners."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import torch

from windlass.core.launch import Launch
from windlass.core.model import ModelSpec
from windlass.core.scheme import kv_token_bytes
from windlass.errors import BadInput
from windlass.runtime.engine.execute.runner import Runner
from windlass.runtime.engine.sample.sampler import Sampler
from windlass.runtime.engine.schedule.scheduler import SchedulerLimits
from windlass.runtime.engine.speculate.model import ModelDrafter
from windlass.runtime.engine.speculate.speculation import MAX_DRAFTS, MODEL, NGRAM, Speculation
from windlass.runtime.nn.decoder import Decoder
from windlass.runtime.nn.mtp_pass import MtpPass
from windlass.runtime.nn.parallel.shard import ModelShard


def wants_mtp(launch: Launch, spec: ModelSpec, shard: ModelShard) -> bool:
    """Whether the MTP layer is loaded."""
    if launch.speculate == "mtp" and spec.next_token is None:
        raise BadInput(
            f"--speculate mtp: {spec.name or 'this model'} has no MTP layer (or its checkpoint leaves it out); choose auto, ngram or a small model"
        )
    return launch.speculate in ("auto", "mtp") and spec.next_token is not None and shard.is_whole


def check_draft_model(main: Decoder, draft: Decoder) -> None:
    if draft.spec.vocab_size < main.spec.vocab_size // 2 or draft.context_tokens < 2:
        raise BadInput(
            f"--speculate {draft.spec.name}: it has {draft.spec.vocab_size:,} tokens, the model {main.spec.vocab_size:,}; "
            "a model that drafts needs the same tokenizer"
        )


class SpeculationPlan(NamedTuple):
    """What was chosen, before the sizes of caches are known."""

    how: str
    decoder: Any
    draft: Decoder | None

    @property
    def has_mtp(self) -> bool:
        return getattr(self.decoder, "mtp", None) is not None and self.how in ("auto", "mtp")

    @property
    def has_ngram(self) -> bool:
        return self.how in ("auto", "ngram")

    @property
    def max_drafts(self) -> int:
        has_model = self.has_mtp or self.draft is not None
        return max(MAX_DRAFTS[NGRAM] if self.has_ngram else 0, MAX_DRAFTS[MODEL] if has_model else 0)

    def make_weights(self) -> None:
        """What drafting holds beside the model's weights; before memory is shared out."""
        fused = getattr(self.decoder, "fused", None)
        if self.has_mtp and fused is not None:
            fused.make_draft_head()

    def cache_bytes(self, kv: str) -> int:
        """Of one token, beside those of the model."""
        if self.draft is not None:
            return kv_token_bytes(self.draft.spec, kv)
        if not self.has_mtp:
            return 0
        spec: ModelSpec = self.decoder.spec
        assert spec.next_token is not None
        return kv_token_bytes(msgspec.structs.replace(spec, layers=(spec.next_token.layer,)), kv)

    def made(
        self, main: Runner, limits: SchedulerLimits, num_tokens: int, kv: torch.dtype, device: str, spare: int
    ) -> Speculation | None:
        """`spare`: blocks of a cache beyond those of the scheduler."""
        if not self.max_drafts:
            return None
        model = self._model(main, limits, num_tokens, kv, device, spare)
        # On a GPU a step verifies and drafts in one graph, which makes one draft.
        in_step = self.has_mtp and device != "cpu"
        return Speculation(
            auto=self.how == "auto",
            ngram=self.has_ngram,
            model=model,
            model_drafts=1 if in_step else MAX_DRAFTS[MODEL],
            drafts_in_step=in_step and main.verify_graphs is not None,
            described=self._described,
        )

    @property
    def _described(self) -> str:
        used = [name for name, is_used in (("n-gram lookup", self.has_ngram), ("MTP layer", self.has_mtp)) if is_used]
        used += [] if self.draft is None else [self.draft.spec.name]
        return " and ".join(used) + (", where it pays" if self.how == "auto" else "")

    def _model(
        self, main: Runner, limits: SchedulerLimits, num_tokens: int, kv: torch.dtype, device: str, spare: int
    ) -> ModelDrafter | None:
        blocks = limits.num_blocks + spare
        # A model also computes the newest token of each sequence, one step before the main model does.
        roomy = msgspec.structs.replace(limits, max_step_tokens=limits.max_step_tokens + limits.max_sequences)
        record = device == "cpu"
        if self.draft is not None:
            caches = self.draft.make_caches(blocks, kv, device)
            return ModelDrafter(Runner(self.draft, caches, roomy, device, record, num_tokens), Sampler(num_tokens), self.decoder)
        if not self.has_mtp:
            return None
        layer = self.decoder.mtp
        if device != "cpu":
            self.decoder.keep_normed(roomy.max_step_tokens, device)
        mtp = MtpPass(self.decoder, layer, roomy.max_step_tokens, device)
        caches = [layer.make_cache(blocks, kv, device)]
        runner = Runner(mtp, caches, roomy, device, record, num_tokens)
        if main.verify_graphs is not None:
            main.verify_graphs.draft = lambda step: mtp.after(step, caches)
        return ModelDrafter(runner, Sampler(num_tokens), self.decoder, mtp)


def speculation_for(launch: Launch, decoder: Any, draft: Decoder | None) -> SpeculationPlan:
    return SpeculationPlan(launch.speculate, decoder, draft)

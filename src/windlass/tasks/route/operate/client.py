"""The router as a Client: decides, asks, falls back, remembers and records. It can be served, evaluated and nested like any other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from windlass.core.client import Late, Unavailable
from windlass.core.request import Delta, Info, Request, ScoreRequest, Scores, Stats, Usage
from windlass.errors import BadInput, Error, UnknownName
from windlass.tasks.route.decide.policy import Decision, Policy, Situation, allowed_cost, decide, tolerance_for
from windlass.tasks.route.decide.predict import Prediction, PromptPredictor
from windlass.tasks.route.decide.router_file import RouterFile
from windlass.tasks.route.features.text import text_of
from windlass.tasks.route.operate.answering import Answering, Trial
from windlass.tasks.route.operate.arm import Arm
from windlass.tasks.route.operate.cascade import Cascade, RunTests
from windlass.tasks.route.operate.counters import Counters
from windlass.tasks.route.operate.drift import DriftWatch
from windlass.tasks.route.operate.gate import SwapGate
from windlass.tasks.route.operate.log import DecisionLog, LogLine
from windlass.tasks.route.operate.memory import Bounded, Pinned, conversation_key, is_cacheable, is_continued, repeat_key
from windlass.tasks.route.operate.settings import RouteSettings

AUTO, CHEAP, BEST = "auto", "auto:cheap", "auto:best"
VARIANTS = (AUTO, CHEAP, BEST)
MAX_CONVERSATIONS = 10_000
CONVERSATION_SECONDS = 4 * 3600.0
INFO_SECONDS = 5.0
"""A model that does not say what it is within this time counts as gone, for now."""


class RouterClient:
    """`arms`: by name. `notify`: lines for the operator. Takes ownership of the arms' clients."""

    def __init__(
        self,
        router: RouterFile,
        settings: RouteSettings,
        arms: Mapping[str, Arm],
        log: DecisionLog,
        run_tests: RunTests | None = None,
        notify: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        gate: SwapGate | None = None,
    ) -> None:
        self.router, self.settings, self.arms, self.gate = router, settings, arms, gate
        self.counters = Counters()
        self.drift = DriftWatch(router.low_chance)
        self._predictor, self._log, self._run_tests, self._notify, self._clock = (
            PromptPredictor(router),
            log,
            run_tests,
            notify,
            clock,
        )
        self._order = [arms[model.name] for model in router.models]
        self._cache = Bounded(settings.cache_entries, settings.cache_seconds, clock)
        self._pinned = Bounded(MAX_CONVERSATIONS, CONVERSATION_SECONDS, clock)
        self._started, self._num_requests, self._was_alarm = clock(), 0, False
        self._rules = {rule.model: rule for rule in router.confident}

    @property
    def model_names(self) -> tuple[str, ...]:
        """What a client may ask for: the router, its variants, and each model by name."""
        return (*VARIANTS, *self.arms)

    # --- Client

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        began, self._num_requests = self._clock(), self._num_requests + 1
        key = repeat_key(request) if self.settings.cache_entries else None
        found: Sequence[Delta] | None = self._cache.get(key) if key is not None else None
        if found is not None:
            self._record(request, "cached", self._cache_note(found), "an exact repeat", None, None, began)
            for delta in found:
                yield delta
            return
        how, decision, situation = self._decide(request)
        trial = Trial(first=decision.model, then=decision.then if how != "named" else ())
        cascade = self._cascade(decision.model) if how == "decided" else None
        answering = Answering(self.arms, self.settings.first_token_seconds, cascade, self._notify)
        kept: list[Delta] = []
        error = ""
        try:
            async with aclosing(answering.stream(request, trial)) as deltas:
                async for delta in deltas:
                    shown = delta if kept else _with_notes(delta, how, decision, trial)
                    if key is None:
                        kept.clear()  # only what may be cached is kept whole
                    kept.append(shown)
                    yield shown
        except Error as failure:
            error = str(failure)
            self.counters.lost += isinstance(failure, (Unavailable, Late))
            raise
        finally:
            self._finish(request, how, decision, situation, trial, cascade, kept, began, error, key)

    async def score(self, request: ScoreRequest) -> Scores:
        """By the best single model: scores of different models cannot be compared."""
        return await self._order[self.router.best].client.score(request)

    async def info(self) -> Info:
        """Of all models that answer; raises only if none does."""
        asked = await asyncio.gather(*(arm.current_info(INFO_SECONDS) for arm in self._order), return_exceptions=True)
        found = [one for one in asked if isinstance(one, Info)]
        if not found:
            failure = next((one for one in asked if isinstance(one, Error)), None)
            raise failure or Unavailable("none of the router's models answers")
        lengths = [one.context_tokens for one in found if one.context_tokens]
        return Info(
            model=AUTO,
            context_tokens=max(lengths, default=0),
            max_sequences=sum(max(one.max_sequences, 8 if one.details.get("server") else 1) for one in found),
            has_text=all(one.has_text for one in found),
            has_chat=all(one.has_chat for one in found),
            device=", ".join(dict.fromkeys(one.device for one in found if one.device)),
            details={"route": " ".join(arm.name for arm in self._order)},
            stats=_stats([one.stats for one in found if one.stats is not None]),
        )

    async def close(self) -> None:
        self._log.close()
        for arm in self._order:
            await arm.client.close()

    # --- deciding

    def predict(self, request: Request) -> Prediction:
        return self._predictor.predict(text_of(request))

    def _decide(self, request: Request) -> tuple[str, Decision, Situation | None]:
        variant = request.model or AUTO
        if variant in self.arms:
            return "named", Decision(model=variant, reason="asked for by name"), None
        if variant not in VARIANTS:
            raise UnknownName("model", variant, self.model_names)
        prediction = self.predict(request)
        situation = self._situation(prediction, self._policy(variant))
        decision = decide(situation)
        self.counters.abstained += decision.is_abstained
        if variant == AUTO:
            self.counters.decisions[decision.model] += 1
        if all(
            one.is_available for one in situation.candidates
        ):  # else the choice says more about the models than about the prompts
            self._watch(prediction, decision)
        if self.settings.shadow:
            shadow = Decision(
                model=self.settings.shadow,
                reason=f"shadow mode; would be {decision.model}: {decision.reason}",
                then=decision.then,
            )
            return "shadow", shadow, situation
        pinned = self._pin_of(request, variant)
        if pinned is not None:
            others = tuple(name for name in (decision.model, *decision.then) if name != pinned)
            return "sticky", Decision(model=pinned, reason="the model of this conversation", then=others), None
        return "decided", decision, situation

    def expected_share(self) -> Mapping[str, float]:
        """Of each model, on the data that the router was fitted to; empty where the policy goes by more than the fitted path."""
        policy, path = self.settings.policy, self.router.path
        if policy.kind in ("budget", "latency", "co2") or not path:
            return {}
        tolerance = tolerance_for(policy, self.router.tolerance, path, None)
        return min(path, key=lambda point: abs(point.tolerance - tolerance)).share

    def _policy(self, variant: str) -> Policy:
        given = self.settings.policy
        if variant == CHEAP:
            return msgspec.structs.replace(given, kind="cheap")
        return msgspec.structs.replace(given, kind="best") if variant == BEST else given

    def _situation(self, prediction: Prediction, policy: Policy) -> Situation:
        allowed = allowed_cost(policy, self.counters.cost, self._num_requests, self._clock() - self._started)
        return Situation(
            candidates=tuple(arm.candidate(chance) for arm, chance in zip(self._order, prediction.chances, strict=True)),
            best=self.router.best,
            tolerance=tolerance_for(policy, self.router.tolerance, self.router.path, allowed),
            policy=policy,
            is_unlike=prediction.is_unlike,
            allowed_cost=allowed,
        )

    def _pin_of(self, request: Request, variant: str) -> str | None:
        """The conversation's model, unless its client asks for another variant now or the model is gone."""
        key = conversation_key(request) if self.settings.sticky and is_continued(request) else None
        found: Pinned | None = self._pinned.get(key) if key is not None else None
        if found is None or found.variant != variant or not self.arms[found.model].breaker.is_available:
            return None
        return found.model

    def _watch(self, prediction: Prediction, decision: Decision) -> None:
        chance = prediction.chances[[arm.name for arm in self._order].index(decision.model)]
        self.drift.add(chance, prediction.is_unlike)
        standing = self.drift.standing()
        if standing.is_alarm and not self._was_alarm:
            self._notify(f"drift: {standing.why}; fit the router again with newer answers")
        self._was_alarm = standing.is_alarm

    def _cascade(self, model: str) -> Cascade | None:
        """Only the answers of the first model are judged, and only where another one could do better."""
        settings = self.settings.cascade
        if settings is None or model != (settings.first or self._order[0].name):
            return None
        verifier = self.arms.get(settings.verifier)
        return Cascade(
            settings,
            self._rules.get(model),
            self._run_tests,
            None if verifier is None else lambda request: whole_answer(verifier, request, self.settings.first_token_seconds),
            lambda request: whole_answer(self.arms[model], request, self.settings.first_token_seconds),
        )

    # --- recording

    def _finish(
        self, request: Request, how: str, decision: Decision, situation: Situation | None, trial: Trial,
        cascade: Cascade | None, kept: Sequence[Delta], began: float, error: str, key: str | None,
    ) -> None:  # fmt: skip
        is_whole = bool(kept) and kept[-1].finish_reason is not None
        if is_whole:
            if key is not None and is_cacheable(kept):
                self._cache.put(key, list(kept))
            chat = conversation_key(request) if self.settings.sticky and how != "named" else None
            if chat is not None and trial.answered:
                self._pinned.put(chat, Pinned(model=trial.answered, variant=request.model or AUTO))
        self.counters.resumed += trial.num_resumed
        for attempt in trial.attempts:
            if attempt.outcome == "passed on":
                self.counters.passed_on += 1
            elif attempt.outcome != "kept":
                self.counters.failures[attempt.model] += 1
        failed = any(attempt.outcome not in ("kept", "passed on") for attempt in trial.attempts)
        self.counters.fallbacks += is_whole and failed
        usage = next((delta.usage for delta in reversed(kept) if delta.usage is not None), None)
        self._record(
            request, how, trial.answered, decision.reason, situation, usage, began, trial, cascade, error, decision.model
        )

    def _record(
        self, request: Request, how: str, model: str, reason: str, situation: Situation | None, usage: Usage | None, began: float,
        trial: Trial | None = None, cascade: Cascade | None = None, error: str = "", chosen: str = "",
    ) -> None:  # fmt: skip
        seconds = self._clock() - began
        tokens = usage or Usage(prompt_tokens=0, completion_tokens=0)
        cost = grams = 0.0
        for attempt in trial.attempts if trial is not None else ():
            if attempt.outcome in ("kept", "passed on"):
                arm = self.arms[attempt.model]
                cost += arm.cost(usage, attempt.seconds)
                grams += arm.grams(arm.joules(attempt.seconds))
        self.counters.cost += cost
        self.counters.grams += grams
        self.counters.prompt_tokens += tokens.prompt_tokens
        self.counters.answer_tokens += tokens.completion_tokens
        if model:
            self.counters.requests[model, how] += 1
        self._log.add(
            LogLine(
                time=time.time(), variant=request.model or AUTO, decision=how, model=model, reason=reason, situation=situation,
                chosen=chosen if situation is not None and how == "decided" else decide(situation).model if situation is not None else chosen,
                attempts=tuple(trial.attempts) if trial is not None else (), confidence=cascade.kept.confidence if cascade else None,
                prompt_tokens=tokens.prompt_tokens, answer_tokens=tokens.completion_tokens, seconds=round(seconds, 6), cost=cost,
                grams=grams or None, prompt=text_of(request) if self.settings.log_prompts else None,
                score=cascade.kept.score if cascade else None, error=error,
            )
        )  # fmt: skip

    def _cache_note(self, deltas: Sequence[Delta]) -> str:
        return next((delta.notes["windlass-route-model"] for delta in deltas if "windlass-route-model" in delta.notes), "")


def _with_notes(delta: Delta, how: str, decision: Decision, trial: Trial) -> Delta:
    answering = trial.current
    notes = {"windlass-route-model": answering, "windlass-route-how": how, "windlass-route-reason": decision.reason}
    if answering != decision.model:
        notes["windlass-route-instead-of"] = decision.model
    return msgspec.structs.replace(delta, notes={**delta.notes, **notes})


def _stats(found: Sequence[Stats]) -> Stats | None:
    if not found:
        return None
    names = (
        "waiting",
        "running",
        "num_blocks",
        "blocks_used",
        "blocks_cached",
        "prompt_tokens",
        "completion_tokens",
        "steps",
        "finished",
    )
    summed: dict[str, Any] = {name: sum(getattr(one, name) for one in found) for name in names}
    return Stats(**summed)


async def whole_answer(arm: Arm, request: Request, silent_seconds: float) -> str:
    async with aclosing(arm.stream(request, silent_seconds)) as deltas:
        return "".join([delta.content async for delta in deltas])


def check_budget(settings: RouteSettings, router: RouterFile) -> None:
    """Dollars need costs in the table."""
    if settings.policy.kind == "budget" and "calls" in router.cost_unit:
        raise BadInput("policy budget needs costs: fit the router with --price NAME=IN,OUT for each model")

"""Engines come and go under requests: what is answered is what one engine would have answered, whenever it is cut off, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

pytestmark = pytest.mark.cpu

pytest.importorskip("torch")

from fake_decoder import FakeDecoder, make_engine  # noqa: E402
from hanging import OwnClock, finished  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from windlass.core.client import Broken, Late, Slowed, Unavailable  # noqa: E402
from windlass.core.request import GREEDY, Info, Sampling  # noqa: E402
from windlass.errors import DoesNotFit, Error, TooLong  # noqa: E402
from windlass.runtime.engine.client import replay, requests  # noqa: E402
from windlass.runtime.engine.client.replay import EngineMoved  # noqa: E402
from windlass.runtime.engine.client.requests import EngineRequests  # noqa: E402
from windlass.runtime.engine.client.transport import Lost, Receive  # noqa: E402
from windlass.runtime.engine.loop import EngineLoop  # noqa: E402
from windlass.runtime.engine.protocol import Cancel, Command, EngineFailed, EngineReady, SequenceOutput, StepOutputs, Submit  # noqa: E402

INFO = Info(model="fake", context_tokens=256, vocab_size=64, max_sequences=4)
NEVER = 10**9


class CutPort:
    """An engine on the event loop, cut off after so many steps."""

    def __init__(self, steps: int, error: Error, **limits: Any) -> None:
        self._steps, self._error, self._limits = steps, error, limits
        self.commands: list[Command] = []
        self._new: list[Command] = []
        self._task: asyncio.Task[None] | None = None

    def open(self, receive: Receive, lost: Lost) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(receive, lost))

    async def _run(self, receive: Receive, lost: Lost) -> None:
        engine = make_engine(FakeDecoder(self._limits.get("vocab_size", 64)), **self._limits)
        loop = EngineLoop(engine, INFO, receive)
        receive(EngineReady(INFO))
        while self._steps > 0:
            await asyncio.sleep(0)
            new, self._new = self._new, []
            for command in new:
                loop._handle(command)
            if engine.has_work:
                self._steps -= 1
                receive(StepOutputs(engine.step()))
        lost(self._error)

    def send(self, command: Command) -> None:
        self.commands.append(command)
        self._new.append(command)

    def kill(self) -> None:
        self._steps = 0

    async def close(self) -> None:
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()


def calls_for(cuts: Sequence[int], error: Error, **changes: Any) -> tuple[EngineRequests, list[CutPort]]:
    """Engines that are cut off one after another; the last one stays."""
    ports: list[CutPort] = []
    limits = {key: value for key, value in changes.items() if key not in ("max_crashes", "vocabulary")}

    def make() -> CutPort:
        ports.append(CutPort([*cuts, NEVER][min(len(ports), len(cuts))], error, **limits))
        return ports[-1]

    return EngineRequests(make, None, changes.get("vocabulary"), changes.get("max_crashes", 0)), ports


async def answer(calls: EngineRequests, submit: Submit) -> list[SequenceOutput]:
    """Without what only says that an engine accepted it."""
    return [output async for outputs in calls.outputs(submit) for output in outputs if output != SequenceOutput(output.id, [])]


def answers(submits: Sequence[Submit], cuts: Sequence[int], **changes: Any) -> list[list[SequenceOutput]]:
    """Of all at once."""

    async def run() -> list[list[SequenceOutput]]:
        calls, _ = calls_for(cuts, EngineMoved("the worker is gone"), **changes)
        try:
            return list(await asyncio.gather(*(answer(calls, submit) for submit in submits)))
        finally:
            await calls.close()

    return finished(run())


def told(outputs: Sequence[SequenceOutput]) -> dict[str, Any]:
    """All that does not depend on the clock."""
    finish = outputs[-1].finish
    assert finish is not None
    assert [output.finish for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert sum(output.prefill is not None for output in outputs) <= 1, "it begins once"
    assert min(finish.timings.queue_seconds, finish.timings.prefill_seconds, finish.timings.decode_seconds) >= 0
    return {
        "tokens": [token for output in outputs for token in output.token_ids],
        "logprobs": [entry for output in outputs for entry in output.logprobs],
        "prompt": [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None],
        "finish": (finish.reason, finish.stop_token_id, finish.error, finish.error_kind),
        "usage": (finish.usage.prompt_tokens, finish.usage.completion_tokens),
    }


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    if draw(st.booleans()):
        return GREEDY
    return Sampling(
        temperature=draw(st.sampled_from([0.5, 1.0, 2.0])),
        top_k=draw(st.sampled_from([None, 5])),
        top_p=draw(st.sampled_from([1.0, 0.9])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4])),
        logit_bias=draw(st.sampled_from([{}, {3: 2.0}])),
        seed=draw(st.one_of(st.none(), st.integers(0, 99))),
    )


@st.composite
def submits(draw: st.DrawFn) -> Submit:
    prompt = draw(st.lists(st.integers(0, 63), min_size=1, max_size=40))
    scored = draw(st.sampled_from([None, None, 0, 2]))
    return Submit(
        id=0,
        token_ids=prompt,
        sampling=draw(samplings()),
        max_tokens=draw(st.sampled_from([0, 1, 7, 30])) if scored is not None else draw(st.integers(1, 40)),
        stop_token_ids=draw(st.sampled_from([[], [5, 9]])),
        logprobs=draw(st.sampled_from([None, 0, 2])),
        prompt_logprobs=scored,
        prompt_logprobs_start=draw(st.integers(0, len(prompt))),
        deadline_seconds=draw(st.sampled_from([None, 50.0])),
        owner=draw(st.sampled_from(["", "a"])),
    )


@given(requests=st.lists(submits(), min_size=1, max_size=6), cuts=st.lists(st.integers(0, 25), min_size=1, max_size=4))
def test_answers_are_those_of_one_engine(requests: list[Submit], cuts: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        found: list[list[dict[str, Any]]] = []
        for made in (cuts, []):
            drawn = iter(range(1000, NEVER))
            patch.setattr(replay, "fresh_seed", lambda drawn=drawn: next(drawn))
            # Blocks for one long sequence and a half: some are preempted besides.
            found.append([told(outputs) for outputs in answers(requests, made, num_blocks=12)])
    assert found[0] == found[1]


@pytest.mark.parametrize("cut", [2, 9])
def test_a_grammar_goes_on_where_it_was(cut: int) -> None:
    pytest.importorskip("llguidance")
    from byte_vocab import TEXTUAL

    from windlass.runtime.engine.protocol import TokenizerData

    grammar = msgspec.json.encode({"grammars": [{"lark_grammar": 'start: "{" /[a-c]{3,5}/ ":" /[0-9]{9,12}/ "}"'}]}).decode()
    words = TokenizerData(TEXTUAL.tokenizer.backend.to_str(), [TEXTUAL.end])
    asked = Submit(0, [1, 2, 3], Sampling(seed=5), 30, [TEXTUAL.end], grammar=grammar)
    size = TEXTUAL.tokenizer.vocab_size
    found, alone = (told(answers([asked], cuts, vocabulary=lambda: words, vocab_size=size)[0]) for cuts in ([cut, 3], []))
    assert found == alone
    text = TEXTUAL.tokenizer.decode(found["tokens"])
    assert text.startswith("{") and ":" in text and found["finish"][0] == "stop"


def test_what_was_told_once_is_not_told_again_and_times_are_of_one_life() -> None:
    asked = Submit(0, list(range(20)), GREEDY, 12, logprobs=1, prompt_logprobs=1)

    async def run() -> None:
        calls, ports = calls_for([3, 3, 0], EngineMoved("gone"))
        outputs = await answer(calls, asked)
        finish = outputs[-1].finish
        assert finish is not None and len(ports) == 4
        first, *again = [command for port in ports for command in port.commands if isinstance(command, Submit)]
        assert first.prompt_logprobs == 1 and not first.generated
        assert [submit.prompt_logprobs for submit in again] == [None, None, None][: len(again)]
        counts = [len(submit.generated) for submit in again]
        assert counts == sorted(counts) and counts[0] >= 1
        assert len(outputs[0].prompt_logprobs or ()) == 20
        await calls.close()

    asyncio.run(run())


def test_what_is_finished_is_not_asked_again_however_slowly_it_is_read() -> None:
    """The last tokens wait for their reader while the engine that made them is replaced."""
    submit = Submit(id=0, token_ids=[1, 2, 3], sampling=GREEDY, max_tokens=8)

    async def read(cuts: list[int]) -> tuple[list[SequenceOutput], list[CutPort]]:
        calls, ports = calls_for(cuts, EngineMoved("the worker is gone"))
        found: list[SequenceOutput] = []
        async for outputs in calls.outputs(submit):
            found += outputs
            for _ in range(50):
                await asyncio.sleep(0)
        await calls.close()
        return found, ports

    whole, _ = finished(read([]))
    found, ports = finished(read([8]))
    assert told(found) == told(whole)
    assert len(ports) == 2 and ports[1].commands == []


def test_prompts_are_counted_once() -> None:
    engine = make_engine()
    engine.submit(Submit(1, [1, 2, 3], GREEDY, 6, generated=FakeDecoder().greedy([1, 2, 3], 4)))
    outputs: list[SequenceOutput] = []
    while engine.has_work:
        outputs += engine.step()
    assert [token for output in outputs for token in output.token_ids] == FakeDecoder().greedy([1, 2, 3], 6)[4:]
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.completion_tokens) == (0, 2)
    finish = outputs[-1].finish
    assert finish is not None
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (3, 6)


def test_an_engine_with_less_room_says_so() -> None:
    engine = make_engine(num_blocks=1)
    with pytest.raises(TooLong, match="less than when the request started"):
        engine.submit(Submit(1, [1] * 8, GREEDY, None, generated=[2] * 12))


# --- requests that end engines


POISON = 63


class Poisoned(CutPort):
    """An engine that crashes two steps after it got a prompt with POISON in it."""

    def send(self, command: Command) -> None:
        super().send(command)
        if isinstance(command, Submit) and POISON in command.token_ids:
            self._steps = min(self._steps, 2)


def poisoned_calls() -> tuple[EngineRequests, list[CutPort]]:
    ports: list[CutPort] = []

    def make() -> CutPort:
        ports.append(Poisoned(NEVER, Unavailable("the engine's process was ended by SIGSEGV")))
        return ports[-1]

    return EngineRequests(make, max_crashes=replay.MAX_CRASHES), ports


def poison(number: int = 0, owner: str = "bad/a") -> Submit:
    return Submit(0, [number, POISON], GREEDY, 20, owner=owner)


@pytest.mark.parametrize("place", [0, 2, 5])
def test_who_ends_engines_is_found_among_others_that_are_answered(place: int) -> None:
    async def run() -> None:
        calls, ports = poisoned_calls()
        asked = [Submit(0, [number], GREEDY, 20, owner="good/a") for number in range(5)]
        alone, _ = calls_for([], Unavailable("none"))
        whole = [told(await answer(alone, submit)) for submit in asked]
        asked.insert(place, poison())
        found = await asyncio.gather(*(answer(calls, submit) for submit in asked), return_exceptions=True)
        culprit = found.pop(place)
        assert isinstance(culprit, Broken) and "ended the engine" in str(culprit)
        assert [told(outputs) for outputs in found if not isinstance(outputs, BaseException)] == whole
        assert len(ports) == (3 if place == 0 else 4), "beside others it cannot be told which of them it was"
        await calls.close()
        await alone.close()

    finished(run())


def test_who_ends_engines_is_refused_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        calls, ports = poisoned_calls()
        with pytest.raises(Broken, match="ended the engine"):
            await answer(calls, poison())
        engines = len(ports)
        again = msgspec.structs.replace(poison(), owner="other/b", sampling=Sampling(temperature=0.0, seed=7))
        for submit in (poison(), again):
            with pytest.raises(Broken, match="refused for ten minutes"):
                await answer(calls, submit)
        assert len(ports) == engines, "no engine has seen it again"
        assert len(await answer(calls, Submit(0, [1], GREEDY, 5, owner="bad/a"))) == 5, "others of that key are served"
        monkeypatch.setattr(requests, "REFUSED_SECONDS", 0.0)
        with pytest.raises(Broken):
            await answer(calls, poison())
        assert len(ports) > engines, "it was tried again"
        await calls.close()

    finished(run())


def test_a_key_whose_requests_go_on_ending_engines_is_refused_and_others_are_not() -> None:
    async def run() -> None:
        calls, ports = poisoned_calls()
        for number in range(requests.MOST_CRASHES + 1):
            with pytest.raises(Broken):
                await answer(calls, poison(number))
        engines = len(ports)
        with pytest.raises(Slowed):
            await answer(calls, Submit(0, [1], GREEDY, 5, owner="bad/another"))
        assert len(ports) == engines
        assert len(await answer(calls, Submit(0, [1], GREEDY, 5, owner="good/a"))) == 5
        await calls.close()

    finished(run())


def test_a_suspect_that_leaves_does_not_hold_up_the_next() -> None:
    async def run() -> None:
        calls, ports = poisoned_calls()
        asked = [asyncio.create_task(answer(calls, Submit(0, [number], GREEDY, 20))) for number in range(3)]
        while not ports or not ports[0].commands:
            await asyncio.sleep(0)
        ports[0].kill()
        while len(ports) < 2 or not ports[1].commands:
            await asyncio.sleep(0)
        asked[0].cancel()
        assert [len(outputs) > 0 for outputs in await asyncio.gather(*asked[1:])] == [True, True]
        await calls.close()

    finished(run())


# --- when not


def run_for(
    cuts: Sequence[int], error: Error, max_crashes: int, submit: Submit | None = None
) -> tuple[list[SequenceOutput], int]:
    async def run() -> tuple[list[SequenceOutput], int]:
        calls, ports = calls_for(cuts, error, max_crashes=max_crashes)
        try:
            return await answer(calls, submit or Submit(0, [1, 2, 3], GREEDY, 20)), len(ports)
        finally:
            await calls.close()

    return finished(run())


def test_engines_that_break_are_forgiven_so_often_and_those_that_move_always() -> None:
    broke, moved = Unavailable("the engine's process was ended by SIGSEGV"), EngineMoved("a worker is gone")
    assert run_for([5], broke, 1)[1] == 2
    with pytest.raises(Unavailable, match="SIGSEGV"):
        run_for([5, 5], broke, 1)
    with pytest.raises(Unavailable, match="SIGSEGV"):
        run_for([5], broke, 0)
    assert run_for([2] * 9, moved, 0)[1] == 10


def test_what_is_no_loss_is_not_tried_again() -> None:
    with pytest.raises(DoesNotFit, match="5 bytes"):
        run_for([5], DoesNotFit("5 bytes are missing", 5), 3)


def test_deadlines_go_on_counting() -> None:
    """Two thirds of the time pass in the first engine and the pause."""

    class Pausing(CutPort):
        async def _run(self, receive: Receive, lost: Lost) -> None:
            await asyncio.sleep(400)
            await super()._run(receive, lost)

    async def run() -> None:
        calls = EngineRequests(lambda: Pausing(3, EngineMoved("gone")))
        with pytest.raises(Late, match=r"after 600 s"):
            await answer(calls, Submit(0, [1], GREEDY, 200, deadline_seconds=600.0))
        assert asyncio.get_running_loop().time() == 1000, "400 s until the first was ready, then 600"
        await calls.close()

    with asyncio.Runner(loop_factory=OwnClock) as runner:
        runner.run(run())


def test_a_next_engine_that_cannot_be_fails_who_waits_and_a_later_one_serves() -> None:
    """As when the model does not fit on who is left, until a worker is back."""

    class Refusing(CutPort):
        async def _run(self, receive: Receive, lost: Lost) -> None:
            receive(EngineFailed("DoesNotFit", "7 bytes are missing", 7))
            lost(Unavailable("it ended"))

    async def run() -> None:
        ports: list[CutPort] = []

        def make() -> CutPort:
            kind = Refusing if len(ports) == 1 else CutPort
            ports.append(kind(4 if not ports else NEVER, EngineMoved("gone")))
            return ports[-1]

        calls = EngineRequests(make)
        with pytest.raises(DoesNotFit, match="7 bytes") as found:
            await answer(calls, Submit(0, [1], GREEDY, 20))
        assert found.value.short_bytes == 7
        assert not calls.is_alive
        assert len(await answer(calls, Submit(0, [1], GREEDY, 20))) == 20
        assert len(ports) == 3
        await calls.close()

    asyncio.run(run())


def test_where_no_other_engine_can_be_made_nobody_is_left_waiting() -> None:
    async def run() -> None:
        ports: list[CutPort] = []

        def make() -> CutPort:
            if ports:
                raise OSError(12, "Cannot allocate memory")
            ports.append(CutPort(4, Unavailable("it was ended by SIGKILL")))
            return ports[-1]

        calls = EngineRequests(make, max_crashes=1)
        with pytest.raises(Unavailable, match="Cannot allocate memory"):
            await answer(calls, Submit(0, [1], GREEDY, 20))
        await calls.close()

    finished(run())


async def settled() -> None:
    """All that could go on has."""
    for _ in range(100):
        await asyncio.sleep(0)


def test_moving_is_not_being_gone_and_who_leaves_meanwhile_is_forgotten() -> None:
    async def run() -> None:
        gate = asyncio.Event()

        class Held(CutPort):
            async def _run(self, receive: Receive, lost: Lost) -> None:
                if len(ports) > 1:
                    await gate.wait()
                await super()._run(receive, lost)

        ports: list[CutPort] = []

        def make() -> CutPort:
            ports.append(Held(4 if not ports else NEVER, EngineMoved("gone")))
            return ports[-1]

        calls = EngineRequests(make)
        stays, leaves = (asyncio.create_task(answer(calls, Submit(0, [number], GREEDY, 20))) for number in (1, 2))
        while len(ports) < 2:
            await asyncio.sleep(0)
        assert calls.is_alive and calls.is_moving
        comes, asks = asyncio.create_task(answer(calls, Submit(0, [3], GREEDY, 5))), asyncio.create_task(calls.info())
        await settled()
        leaves.cancel()
        await settled()
        gate.set()
        assert len([token for output in await stays for token in output.token_ids]) == 20
        assert len(await comes) == 5
        assert (await asks).model == "fake"
        assert not calls.is_moving and calls.is_alive
        sent = [command for command in ports[1].commands if isinstance(command, Submit | Cancel)]
        assert [command.id for command in sent] == [1, 3], "nobody asks for who has left"
        await calls.close()

    finished(run())


def test_outputs_are_taken_together_and_an_error_ends_them() -> None:
    async def run() -> None:
        pending = replay.PendingRequest(1, Submit(id=0, token_ids=[1]))
        for token in (5, 6):
            pending.take(SequenceOutput(id=1, token_ids=[token]))
        assert [output.token_ids for output in await pending.outputs()] == [[5], [6]]
        waiting = asyncio.create_task(pending.outputs())
        await asyncio.sleep(0)
        waiting.cancel()  # whoever waited has gone; what comes after it is kept
        pending.take(SequenceOutput(id=1, token_ids=[7]))
        assert [output.token_ids for output in await pending.outputs()] == [[7]]
        waiting = asyncio.create_task(pending.outputs())
        await asyncio.sleep(0)
        pending.fail(Unavailable("first"))
        pending.fail(Unavailable("second"))
        with pytest.raises(Unavailable, match="first"):
            await waiting

    asyncio.run(run())

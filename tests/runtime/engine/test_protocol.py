from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass import errors
from windlass.core.client import Broken, Late, Unavailable
from windlass.core.launch import Launch, RandomInit
from windlass.core.ranks.frames import BadFrame
from windlass.core.request import GREEDY, Info, Sampling, Timings, TokenLogprob, Usage
from windlass.runtime.engine.protocol import (
    Cancel,
    EngineFailed,
    EngineReady,
    Finish,
    InfoReply,
    InfoRequest,
    LoadProgress,
    MessageReader,
    PrefillStats,
    RequestRejected,
    SequenceOutput,
    StepOutputs,
    Submit,
    as_error,
    describe_error,
    encode_frame,
    finish_error,
)

pytestmark = pytest.mark.pure

ENTRY = TokenLogprob(token_id=4, logprob=-1.5, rank=2, top=(TokenLogprob(token_id=5, logprob=-0.1, rank=1),))
FINISH = Finish("stop", Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1), Timings(decode_seconds=0.5), 7)
INFO = Info(model="m", context_tokens=8)
COMMANDS = [
    Submit(1, [1, 2, 3], GREEDY, 5, [9], 2, 0, 1, "salt"),
    Submit(2, list(range(5000)), Sampling(seed=2**64 - 1, logit_bias={3: 1.5})),
    Cancel(1),
    InfoRequest(3),
]
REPORTS = [
    LoadProgress(5, 10),
    EngineReady(INFO),
    StepOutputs([SequenceOutput(1, [4], [ENTRY], [None, ENTRY], PrefillStats(16, 0.1, 0.2), FINISH), SequenceOutput(2, [7])]),
    RequestRejected(4, "BadInput", "no"),
    InfoReply(3, INFO),
    EngineFailed("", "RuntimeError: broken"),
]


@given(st.lists(st.integers(1, 40), max_size=200))
def test_messages_arrive_whole_however_they_are_cut(cuts: list[int]) -> None:
    for messages, read in ((COMMANDS, MessageReader().commands), (REPORTS, MessageReader().reports)):
        data = b"".join(map(encode_frame, messages))
        found = []
        for cut in cuts:
            found += read(data[:cut])
            data = data[cut:]
        assert found + read(data) == messages


def test_what_is_not_ours_is_refused() -> None:
    with pytest.raises(BadFrame, match="longest allowed"):
        MessageReader().reports(b"\xff\xff\xff\xff")
    with pytest.raises(msgspec.ValidationError):
        MessageReader().commands(encode_frame(EngineReady(INFO)))
    with pytest.raises((msgspec.DecodeError, BadFrame)):
        MessageReader().commands(encode_frame(Cancel(1))[:4] + b"junk" * 5)


def test_a_launch_survives_the_wire() -> None:
    launch = Launch(model="/m", kv="fp32", random_weights=RandomInit(config={"model_type": "x"}), max_sequences=3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(launch), type=Launch) == launch


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.BadInput("a"), errors.BadInput),
        (errors.BadConfig("b"), errors.BadConfig),
        (errors.BadCheckpoint("c", "file", "tensor", 5), errors.BadInput),
        (errors.Impossible("d"), errors.Impossible),
        (errors.TooLong("d", field="prompt"), errors.TooLong),
        (errors.BadInput("a", field="logit_bias"), errors.BadInput),
        (errors.UnknownName("device", "tpu", ["cpu"]), errors.BadInput),
        (errors.MissingExtra("x", "run", "y"), errors.BadInput),
        (errors.Error("e"), errors.Error),
    ],
)
def test_errors_cross_the_border(error: errors.Error, kind: type[errors.Error]) -> None:
    found = as_error(EngineFailed(**describe_error(error)))
    assert type(found) is kind
    assert str(found) == str(error)
    assert getattr(found, "field", "") == getattr(error, "field", "")


@pytest.mark.parametrize(
    ("kind", "made"),
    [("BadInput", errors.BadInput), ("TooLong", errors.TooLong), ("Late", Late), ("", Broken)],
)
def test_errors_that_end_an_answer_keep_their_kind(kind: str, made: type[errors.Error]) -> None:
    field = "constraint" if issubclass(made, errors.BadInput) else ""
    found = finish_error(Finish("error", Usage(prompt_tokens=1, completion_tokens=0), Timings(), None, "why", kind, field))
    assert type(found) is made
    assert getattr(found, "field", "") == field


def test_lack_of_memory_crosses_with_its_number() -> None:
    found = as_error(RequestRejected(1, **describe_error(errors.DoesNotFit("5 short", 5))))
    assert isinstance(found, errors.DoesNotFit)
    assert found.short_bytes == 5


def test_other_errors_are_the_engines_failure() -> None:
    found = as_error(EngineFailed(**describe_error(ValueError("two\nlines"))))
    assert isinstance(found, Unavailable)
    assert str(found) == "the engine failed: ValueError: two"

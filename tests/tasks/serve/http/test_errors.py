"""What clients are told when something goes wrong, and what they are not."""

from __future__ import annotations

import pytest

from windlass.core.client import Broken, Busy, Late, Slowed, Unavailable
from windlass.errors import BadCheckpoint, BadConfig, BadInput, DoesNotFit, Error, TooLong
from windlass.tasks.serve.http import errors
from windlass.wire.schema.chat import ChatMessage, ChatRequest
from windlass.wire.schema.errors import ApiError

BODY = ChatRequest(messages=[ChatMessage(role="user", content="Hello")])


@pytest.mark.pure
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ApiError("n is 99", param="n", status=400, code="invalid_value"), 400, "invalid_value"),
        (BadInput("the prompt is empty"), 400, "invalid_value"),
        (TooLong("prompt of 9,000 tokens and 16 new ones do not fit in 4,096 tokens"), 400, "context_length_exceeded"),
        (Busy("too many grammars in /secret"), 429, "rate_limit_exceeded"),
        (Broken("the logits of /secret are not numbers"), 500, "answer_failed"),
        (Late("late"), 408, "deadline_exceeded"),
        (Unavailable("ended by SIGKILL: /secret"), 503, "engine_unavailable"),
        (DoesNotFit("/secret does not fit", 5), 503, "engine_unavailable"),
        (BadCheckpoint("bad", "/secret/model.safetensors"), 503, "engine_unavailable"),
        (BadConfig("/secret/config.json: bad"), 503, "engine_unavailable"),
        (Error("/secret"), 503, "engine_unavailable"),
        (ZeroDivisionError("/secret"), 500, "internal"),
        (OSError(28, "No space left on device", "/secret"), 500, "internal"),
    ],
)
def test_every_error_has_a_status_and_no_secret(error: BaseException, status: int, code: str | None) -> None:
    found = errors.to_api_error(error)
    assert (found.status, found.code) == (status, code)
    assert "secret" not in str(found)


@pytest.mark.pure
def test_who_is_refused_is_told_until_when() -> None:
    assert errors.to_api_error(Slowed("too often", 412.3)).retry_seconds == 413
    assert errors.to_api_error(Slowed("too often", 0.0)).retry_seconds == 1


@pytest.mark.pure
def test_the_engines_errors_name_the_parameter() -> None:
    assert errors.to_api_error(BadInput("this model cannot", field="tool_choice"), BODY).param == "tool_choice"
    assert errors.to_api_error(BadInput("it is empty", field="prompt"), BODY).param == "messages"
    assert errors.to_api_error(BadInput("tool_choice is not to blame"), BODY).param is None
    assert errors.to_api_error(BadInput("nobody asked", field="tool_choice")).param is None


@pytest.mark.cpu
def test_a_prompt_that_is_too_long_for_the_scheduler() -> None:
    pytest.importorskip("torch")
    from windlass.runtime.engine.schedule.scheduler import Scheduler, SchedulerLimits
    from windlass.runtime.engine.schedule.sequence import Sequence

    scheduler = Scheduler(SchedulerLimits(num_blocks=4, block_tokens=16, context_tokens=64, max_sequences=1, max_step_tokens=64))
    with pytest.raises(BadInput) as raised:
        scheduler.submit(Sequence(id=1, tokens=list(range(60)), num_prompt=60, max_tokens=10))
    found = errors.to_api_error(raised.value, BODY)
    assert (found.status, found.code, found.param) == (400, "context_length_exceeded", "messages")

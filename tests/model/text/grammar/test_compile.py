"""What goes wrong in llguidance, and whose fault it is said to be."""

from __future__ import annotations

from typing import Any

import pytest

from windlass.core.client import Broken
from windlass.errors import BadInput
from windlass.model.text.grammar.compile import grammar_tokenizer

pytestmark = pytest.mark.pure


def test_another_version_of_the_library_is_not_the_clients_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 1.7 it took one end token, not a list."""
    library = pytest.importorskip("llguidance")

    def tokenizer(*_: Any, **__: Any) -> None:
        raise TypeError("argument 'eos_token': 'list' object cannot be interpreted as an integer")

    monkeypatch.setattr(library, "LLTokenizer", tokenizer)
    with pytest.raises(Broken, match=r"another version of llguidance.*eos_token") as caught:
        grammar_tokenizer("{}", [0, 1])
    assert not isinstance(caught.value, BadInput)


def test_a_tokenizer_that_it_cannot_use_is_said_so() -> None:
    pytest.importorskip("llguidance")
    with pytest.raises(BadInput, match="cannot use this model's tokenizer"):
        grammar_tokenizer("{}", [0])

"""Two kinds of struct: what is asked is strict, what is answered may grow.

A request's unknown field is a wish that would not be met, so it is refused. An answer's unknown field is another server's business.
"""

from __future__ import annotations

from typing import Annotated, dataclass_transform

from msgspec import Meta, Struct, StructMeta, field


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class AskedMeta(StructMeta):
    """Tells type checkers what msgspec does."""


class Asked(Struct, metaclass=AskedMeta, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Null and left out are the same. Written without what is left out, so that servers which know less take it."""


class Answered(Struct, metaclass=AskedMeta, frozen=True, kw_only=True):
    """A field that is UNSET is not written."""


MOST = 2**31 - 1
"""JSON's integers have no end. Engines' have: 32 bits are more tokens, and more kinds of them, than any model has."""

Count = Annotated[int, Meta(ge=1, le=MOST)]
Natural = Annotated[int, Meta(ge=0, le=MOST)]
TopK = Annotated[int, Meta(ge=-1, le=MOST)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Share = Annotated[float, Meta(gt=0, le=1)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
Repetition = Annotated[float, Meta(ge=0.01, le=100)]
Positive = Annotated[float, Meta(gt=0)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]

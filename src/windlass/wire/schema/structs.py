"""Base structs of requests and responses, and bounded number types.

Unknown fields of a request are rejected, because they would have no effect. Unknown fields of a response are ignored.
"""

from __future__ import annotations

from typing import Annotated, dataclass_transform

from msgspec import Meta, Struct, StructMeta, field


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class FrozenStructMeta(StructMeta):
    """Declares msgspec's dataclass semantics to type checkers."""


class RequestStruct(
    Struct, metaclass=FrozenStructMeta, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Null means absent. Absent fields are not written, for servers that know fewer of them."""


class ResponseStruct(Struct, metaclass=FrozenStructMeta, frozen=True, kw_only=True):
    """UNSET fields are not written."""


MAX_INTEGER = 2**31 - 1
"""JSON integers are unbounded; engines use 32 bits, which is more than any context length or vocabulary."""

Count = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
Natural = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
TopK = Annotated[int, Meta(ge=-1, le=MAX_INTEGER)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Share = Annotated[float, Meta(gt=0, le=1)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
Repetition = Annotated[float, Meta(ge=0.01, le=100)]
Positive = Annotated[float, Meta(gt=0)]
Priority = Annotated[int, Meta(ge=-4, le=4)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]

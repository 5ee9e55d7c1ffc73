"""What measured values are made of: records that JSON carries between ranks and into files."""

from typing import Annotated

import msgspec

Natural = Annotated[int, msgspec.Meta(ge=0)]
"""A number of things or of bytes."""
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
"""A time or a rate: nothing below 0 can have been measured."""


class JsonRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value whose JSON holds all of its fields without a default, and no others."""

"""A field's key -> the member of a sample that it is read from, or a value within one of JSON."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np

from dataio.base.errors import FieldError, SourceError
from dataio.rows.fields import Field, Raw
from dataio.source.formats.records import refuse_key
from dataio.source.formats.stored_values import json_text, json_value, read_json
from dataio.source.values import refuse_letters, shaped

JSON = "json"
TEXT = (JSON, "txt", "text", "transcript", "cls", "__key__")
"""Extensions of text, by the conventions of WebDataset."""
SHOWN = 12
"""Of a sample's extensions, in a message."""
REPLACE_DOTS = r"--transform='s/\./_/g;s/_\([^_]*\)$/.\1/'"
"""How GNU tar replaces the dots of a name but the last."""


@dataclass(frozen=True)
class MemberKey:
    """Where a field is read from.

    Attributes:
        extension: Of the member that is the value, in lower case.
        json_extension: Of the member that holds it, where there is no such one; "" if none may.
        inner: Its key there: ``a.b`` is the key ``b`` of the object under ``a``.
    """

    extension: str
    json_extension: str = ""
    inner: str = ""

    @classmethod
    def of(cls, field: Field) -> "MemberKey":
        """Read it from a field's key, such as ``jpg``, ``json.a.b`` or ``seg.json.a``."""
        parts = field.key.split(".")
        at = next((i for i, part in enumerate(parts[:-1]) if part.lower() == JSON), None)
        if at is None:
            return cls(field.key.lower())
        outer, inner = ".".join(parts[: at + 1]), ".".join(parts[at + 1 :])
        return cls(field.key.lower(), outer.lower(), inner)


def member_keys(fields: Mapping[str, Field], path: str) -> dict[str, MemberKey]:
    """Find where each field is read from.

    Raises:
        FieldError: If an array is to be read from a member whose extension says that it is text.
    """
    keys = {name: MemberKey.of(field) for name, field in fields.items()}
    for name, key in keys.items():
        if key.extension.rpartition(".")[2] in TEXT and not key.inner:
            refuse_letters(f"{path}: member {key.extension!r}", fields[name], name)
    return keys


def extensions_of(keys: Mapping[str, MemberKey]) -> frozenset[str]:
    """List the extensions that may have to be read."""
    return frozenset(
        extension
        for key in keys.values()
        for extension in (key.extension, key.json_extension)
        if extension
    )


def value_within(data: memoryview, key: MemberKey, field: Field, name: str, where: str) -> Raw:
    """Find a field's value in a member of JSON.

    Raises:
        SourceError: If the member is no JSON.
        FieldError: If it has no such key.
    """
    where = f"{where}, member {key.json_extension!r}"
    try:
        text = json_text(data)
        document = read_json(text)
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"{where}: found {bytes(data[:40])!r}, expected JSON ({error}); write the shard again"
        ) from error
    try:
        value = json_value(document, key.inner, where, field=field, text=text)
    except KeyError as error:
        refuse_key(where, error.args, key.inner, name)
    return shaped(value, field, name) if isinstance(value, np.ndarray) else value


def missing_member(
    path: str, sample: str, held: Iterable[str], extension: str, name: str
) -> FieldError:
    """Describe a sample that lacks the member of a field."""
    names = sorted(held)
    shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if names[SHOWN:] else "")
    cure = "name a member that it has, or repair the shard"
    longer = next((held for held in names if held.endswith(f".{extension}")), None)
    if longer is not None:
        new = PurePosixPath(path).with_suffix(".new.tar").name
        cure = (
            f"its name has a dot before, and the key ends at the first: name {longer!r} if all "
            "samples have that, else write the shard again with other dots replaced: "
            f"`mkdir unpacked && tar -xf {shlex.quote(path)} -C unpacked && cd unpacked && "
            f"tar -cf ../{shlex.quote(new)} --sort=name {REPLACE_DOTS} *`"
        )
    return FieldError(
        f"{path}: sample {sample!r} holds {shown or 'nothing'}, expected {extension!r} for field "
        f"{name!r}; every sample needs every field: {cure}"
    )

"""A certificate as a document: its digest or signature, and what two of them differ in."""

import hashlib
import hmac
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tonari.errors import CommandError

FORMAT = 1
MIN_KEY_BYTES = 16

Document = dict[str, Any]


def read_key(path: Path) -> bytes:
    """Read a key, all bytes of a file.

    Raises:
        CommandError: If it cannot be read, or is short.
    """
    try:
        key = path.read_bytes()
    except OSError as error:
        raise CommandError(f"--key {path}: cannot be read ({error}); correct the path") from error
    if len(key) < MIN_KEY_BYTES:
        raise CommandError(
            f"--key {path}: has {len(key)} bytes, expected {MIN_KEY_BYTES} at least; make one with "
            f"`head -c 32 /dev/urandom > {path}`"
        )
    return key


def seal(body: Document, key: bytes | None) -> Document:
    """Add a digest to a certificate, or a signature where there is a key."""
    kind = "none" if key is None else "hmac-sha256"
    return {**body, "seal": {"signature": kind, "value": _value(body, key)}}


def open_seal(path: Path, key: bytes | None) -> tuple[Document, str]:
    """Read a certificate.

    Returns:
        All but the seal; and what is known of its signature.

    Raises:
        CommandError: If it is none, was changed, or is not signed by the key.
    """
    try:
        document = json.loads(path.read_text())
        found = document.pop("seal")
        kind, value = str(found["signature"]), str(found["value"])
        is_known = document["tonari_certificate"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandError(
            f"{path}: is no certificate ({error!r}), expected what `tonari certify` wrote; give "
            "such a file"
        ) from error
    if not is_known:
        raise CommandError(
            f"{path}: has format {document['tonari_certificate']}, this version of Tonari reads "
            f"{FORMAT}; check it with the version that made it"
        )
    if (kind == "none") != (key is None):
        if key is not None:
            raise CommandError(
                f"{path}: is not signed, and --key asks for a signature; ask for a signed one, or "
                "leave --key out"
            )
        return document, "signed, not checked: give --key"
    if not hmac.compare_digest(_value(document, key), value):
        why = "its own digest" if key is None else "a signature by this key"
        raise CommandError(
            f"{path}: was changed: it does not match {why}; bring it back as it was made"
            + ("" if key is None else ", or give the key that it was signed with")
        )
    return document, "none" if key is None else "signed by the key"


def differences(one: Any, other: Any, name: str = "") -> Iterator[str]:
    """Name what differs between two documents, each with both values."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            yield from differences(one.get(key), other.get(key), f"{name}.{key}" if name else key)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from differences(a, b, f"{name}[{number}]")
    elif one != other:
        yield f"{name} (certified {_short(one)}, found {_short(other)})"


def _short(value: object) -> str:
    text = f"{len(value)} entries" if isinstance(value, list | dict) else json.dumps(value)
    return text if len(text) <= 70 else f"{text[:67]}..."


def _value(body: Document, key: bytes | None) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    if key is None:
        return hashlib.sha256(text).hexdigest()
    return hmac.new(key, text, "sha256").hexdigest()

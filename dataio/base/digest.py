"""Short names for what is too long to compare or to keep."""

import hashlib


def digest(data: str | bytes) -> str:
    """Hash to 16 hex digits: equal ones are taken for equal data."""
    raw = data.encode() if isinstance(data, str) else data
    return hashlib.blake2b(raw, digest_size=8).hexdigest()

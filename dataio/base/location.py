"""What may be shown, and kept, of where data lies: never what opens it.

A URL may hold secrets: a signature or key behind its ``?``, a password before its ``@``. All that
names a location for people, a file or a saved state passes `shown`: messages, logs, names of
shards, fingerprints. What it leaves out stays in memory, see `dataio.source.storage.names`.
"""

import re
from typing import Any
from urllib.parse import unquote

OPTIONS = frozenset({"region", "scheme", "endpoint_override", "anonymous"})
"""Of ``s3://``, none of them secret."""
CONTAINER_SCHEMES = frozenset({"abfs", "abfss", "wasb", "wasbs"})
"""Where ``name@`` in front is a place."""

_CHAIN = re.compile(r"::(?=[a-zA-Z][a-zA-Z0-9+.-]*://)")
"""Between what one URL reads by means of another."""
_URL = re.compile(rf"[a-zA-Z][a-zA-Z0-9+.-]*://(?:(?!{_CHAIN.pattern})[^\s\"<>])*")
_CLOSING = re.compile(r"[)\]},.;:']*$")
_OPTIONS_BEHIND = re.compile(r"\?[\w.~%-]+=")
_PORT = re.compile(r"[^:]*(:\d*)?|\[[^]]*\](:\d*)?")
_NAMED_SECRET = re.compile(
    r"""([\w-]*(?:secret|token|passw(?:or)?d|pwd|signature|credential|api[_-]?key|access[_-]?key"""
    r"""|account[_-]?key|authorization|cookie|\bsig)[\w-]*["']?\s*[:=]\s*["']?)"""
    r"""((?:bearer|basic|aws4-hmac-sha256)\s+)?[^\s"'&,;)}\]>]+""",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE)


def bare(location: str) -> str:
    """Leave out of a location what may be a secret: this is its name.

    Left out is what stands behind ``?``, and user and password, but for options of ``s3://``.
    Paths of files, and what ``?`` stands for in a glob, stay as they are.
    """
    if "://" not in location:
        return location
    return "::".join(_bare(part) for part in _CHAIN.split(location))


def bare_within(document: Any) -> Any:
    """Name each location in a document of JSON: what a run keeps of its settings."""
    if isinstance(document, dict):
        return {name: bare_within(value) for name, value in document.items()}
    if isinstance(document, (list, tuple)):
        return [bare_within(value) for value in document]
    return bare(document) if isinstance(document, str) else document


def shown(text: str) -> str:
    """Write a text with each URL in it as its name."""
    return _URL.sub(_bare_before_closing, text) if "://" in text else text


def split_query(url: str) -> tuple[str, str]:
    """Divide a URL before what its server is asked with, ``"?name=value"``; "" if there is none."""
    scheme, mark, rest = _CHAIN.split(url)[-1].partition("://")
    if not mark:
        return url, ""
    if scheme.lower() in ("http", "https"):
        at = rest.find("?")
    else:
        # Elsewhere it may stand for any letter of a name.
        found = _OPTIONS_BEHIND.search(rest)
        at = found.start() if found else -1
    return (url, "") if at < 0 else (url[: at - len(rest)], rest[at:])


def split_user(url: str) -> tuple[str, str, str]:
    """Divide a URL into ``scheme://``, user and password with their ``@`` (or ""), and the rest."""
    start = url.find("://") + 3
    head, rest = url[:start], url[start:]
    authority = rest.partition("/")[0]
    end = authority.rfind("@") + 1
    if not end and not _PORT.fullmatch(authority):
        # A slash in a password that nobody encoded.
        end = rest.rfind("@") + 1
    user = rest[:end]
    if head[:-3].lower() in CONTAINER_SCHEMES and ":" not in user:
        return url[:start], "", rest
    return head, user, rest[end:]


def explained(error: BaseException, url: str) -> str:
    """Write what another library raised over a URL, for a message.

    Args:
        error: Its own text may repeat the URL, parts of it, or what it sent to the server.
        url: What was asked for; each of its secrets is left out wherever it stands.
    """
    text = " ".join(str(error).split())
    for secret in sorted(_secrets(url), key=len, reverse=True):
        text = text.replace(secret, "...")
    text = _BEARER.sub(r"\1 ...", _NAMED_SECRET.sub(r"\1...", shown(text)))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _bare_before_closing(match: re.Match[str]) -> str:
    closing = _CLOSING.search(match[0])
    end = closing[0] if closing else ""
    return _bare(match[0][: len(match[0]) - len(end)]) + end


def _bare(url: str) -> str:
    plain, query = split_query(url)
    head, user, rest = split_user(plain)
    user = user if _only_options(user.removesuffix("@")) else ""
    query = query if head == "s3://" and _only_options(query[1:]) else ""
    return f"{head}{user}{rest}{query}"


def _only_options(text: str) -> bool:
    pairs = [pair.partition("=") for pair in text.split("&")]
    return all(
        name in OPTIONS and mark and "@" not in unquote(value) for name, mark, value in pairs
    )


def _secrets(url: str) -> set[str]:
    plain, query = split_query(url)
    parts = re.split(r"[&=?]", query)[2:] + re.split(r"[:@]", split_user(plain)[1])
    found = {form for part in parts for form in (part, unquote(part), unquote(part).rstrip("="))}
    # Shorter ones are numbers and names that stand in any text.
    return {part for part in found if len(part) >= 4 and part not in OPTIONS}

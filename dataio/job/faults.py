"""Classify an error: what caused it, and whether that was another rank."""

from dataio.base.errors import DataioError, StallError, WorldError

PEER_WORDS = (
    "gloo", "connection closed by peer", "connection reset by peer", "nccl",
    # Of torch's store, where the rank that holds it is gone
    "broken pipe", "did the remote server shutdown",
)  # fmt: skip


def find_cause(error: BaseException) -> BaseException:
    """Find what went wrong in a stage: torch's pipelines raise errors of their own from it."""
    while type(error) is RuntimeError and error.__cause__ is not None:
        error = error.__cause__
    return error


def is_of_a_peer(error: BaseException) -> bool:
    """Whether an error means that another rank went away or hangs, by what torch writes in it."""
    if isinstance(error, StallError):
        return True
    cause = error.__cause__
    if isinstance(error, DataioError) and cause is not None and is_of_a_peer(cause):
        # Such as a checkpoint that was not written because a peer went away meanwhile.
        return True
    # Torch raises RuntimeError, our world repeats its words: a file of such a name is no sign.
    words = str(error).lower() if isinstance(error, (RuntimeError, WorldError)) else ""
    return any(of_a_peer in words for of_a_peer in PEER_WORDS)

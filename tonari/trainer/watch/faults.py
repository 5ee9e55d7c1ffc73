"""Classify an error: what caused it, and whether that was another rank."""

from dataio.base.errors import StallError, WorldError
from tonari.trainer.errors import CheckpointError

PEER_WORDS = ("gloo", "connection closed by peer", "connection reset by peer", "nccl")


def find_cause(error: BaseException) -> BaseException:
    """Find what went wrong in a stage: torch's pipelines raise errors of their own from it."""
    while type(error) is RuntimeError and error.__cause__ is not None:
        error = error.__cause__
    return error


def is_of_a_peer(error: BaseException) -> bool:
    """Whether an error means that another rank went away or hangs, by what torch writes in it."""
    if isinstance(error, CheckpointError) and error.__cause__ is not None:
        # A checkpoint was not written because a peer went away meanwhile.
        return is_of_a_peer(error.__cause__)
    if isinstance(error, StallError):
        return True
    # Torch raises RuntimeError, our world repeats its words: a file of such a name is no sign.
    words = str(error).lower() if isinstance(error, (RuntimeError, WorldError)) else ""
    return any(of_a_peer in words for of_a_peer in PEER_WORDS)

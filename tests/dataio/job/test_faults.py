"""What caused an error, and whether that was another rank."""

import pytest

from dataio.base.errors import CacheError, StallError, WorldError
from dataio.job.faults import find_cause, is_of_a_peer


def test_what_went_wrong_in_a_stage_is_found_behind_the_errors_of_the_pipeline() -> None:
    lost = RuntimeError("Connection closed by peer")
    wrapped, ours = RuntimeError("Failed to run stage backward"), CacheError("no")
    wrapped.__cause__, ours.__cause__ = lost, OSError()
    assert find_cause(wrapped) is lost
    assert find_cause(ours) is ours, "what is known here was added to it"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1"), True),
        (StallError("rank 3 did not come"), True),
        (WorldError("receive from rank 0 failed: Connection closed by peer"), True),
        (RuntimeError("Broken pipe"), True),
        (RuntimeError("Failed to recv. Did the remote server shutdown or crash?"), True),
        (BrokenPipeError("Broken pipe"), False),
        (RuntimeError("mat1 and mat2 shapes"), False),
        (FileNotFoundError("/home/gloo/data"), False),
    ],
)
def test_an_error_that_a_peer_caused_is_known(error: Exception, expected: bool) -> None:
    assert is_of_a_peer(error) == expected


@pytest.mark.parametrize(
    ("cause", "expected"),
    [(RuntimeError("[gloo] Connection closed by peer"), True), (OSError("no space"), False)],
)
def test_an_error_of_ours_is_of_a_peer_if_its_cause_is(cause: Exception, expected: bool) -> None:
    error = CacheError("a save was not written")
    error.__cause__ = cause
    assert is_of_a_peer(error) == expected

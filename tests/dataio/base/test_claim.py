"""A claim is one process's alone, and dies with it."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from dataio.base.claim import NoLocksError, claim, claimant
from tests.claims import held_elsewhere


def test_a_claim_excludes_others_names_its_owner_and_dies_with_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.lock"
    assert claimant(path) is None
    with held_elsewhere(path) as process:
        by = claimant(path)
        assert by is not None
        assert f"process {process.pid} on " in str(by)
        with claim(path) as taken:
            assert not taken
        assert claimant(path) == by, "who tried changed nothing"
        process.kill()
        process.wait(60)
        assert claimant(path) is None
        with claim(path) as taken:
            assert taken


def test_a_filesystem_without_locks_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with pytest.raises(NoLocksError, match="No locks available"), claim(tmp_path / "a"):
        pass


def test_a_full_disk_has_no_room_for_a_name_and_the_claim_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    with claim(tmp_path / "a") as taken:
        assert taken

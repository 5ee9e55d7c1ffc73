"""A cache's lock: one writer or many readers, named, and dead with its owner."""

import fcntl
import json
import os
import threading
from dataclasses import replace

import pytest

import dataio.store.lock
from dataio.base.claim import Claimant
from dataio.base.errors import CacheBusyError
from dataio.store.lock import CacheLock, describe, gate, owners


def test_one_writer_or_many_readers(tmp_path):
    first, second, third = (CacheLock(tmp_path) for _ in range(3))
    assert first.take("exchanging")
    assert not second.take("staging")
    assert not second.join()
    first.release()
    assert second.join()
    assert third.join()
    assert not first.take("staging")
    second.release()
    third.release()
    assert first.take("staging")


def test_a_writer_turns_reader_and_back_only_when_alone(tmp_path):
    first, second = CacheLock(tmp_path), CacheLock(tmp_path)
    assert first.take("staging")
    first.share()
    assert first.shared
    assert second.join()
    with pytest.raises(CacheBusyError, match="holds other rows than this job needs and is in use"):
        first.upgrade("staging")
    assert first.shared
    second.release()
    assert not CacheLock(tmp_path).take("staging"), "the failed try kept the shared lock"
    first.upgrade("staging")
    assert not second.join()


@pytest.mark.parametrize("change", ["share", "upgrade"])
def test_nobody_slips_in_while_a_writer_turns_reader_or_back(tmp_path, monkeypatch, change):
    """The moment in which the kernel has let go of the old lock is made long."""
    mine, refused = CacheLock(tmp_path), []
    assert mine.take("staging")
    if change == "upgrade":
        mine.share()
    convert = dataio.store.lock._flock

    def slow(descriptor, kind):
        if descriptor == mine._descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            with pytest.raises(CacheBusyError, match="changing hands"):
                CacheLock(tmp_path).take("exchanging")
            refused.append(kind)
        return convert(descriptor, kind)

    with monkeypatch.context() as patched:
        patched.setattr(dataio.store.lock, "GATE_TIMEOUT_S", 0.02)
        patched.setattr(dataio.store.lock, "_flock", slow)
        mine.share() if change == "share" else mine.upgrade("staging")
    assert len(refused) == 1
    assert not CacheLock(tmp_path).take("exchanging")


def test_looking_who_uses_it_disturbs_nobody(tmp_path):
    stop, failed = threading.Event(), []

    def look():
        while not stop.is_set():
            owners(tmp_path)

    lock = CacheLock(tmp_path)
    lookers = [threading.Thread(target=look) for _ in range(3)]
    for looker in lookers:
        looker.start()
    for _ in range(300):
        failed.append(not lock.take("staging"))
        lock.release()
    stop.set()
    for looker in lookers:
        looker.join(10)
    assert not any(failed)


def test_owners_are_named_with_user_host_and_job(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert owners(tmp_path) == []
    lock, other = CacheLock(tmp_path), CacheLock(tmp_path)
    assert lock.join()
    assert other.join("exporting")
    found = owners(tmp_path)
    assert [owner.mode for owner in found] == ["sharing", "exporting"]
    assert found[0].pid == os.getpid()
    assert found[0].job == "4711"
    assert "job 4711" in describe(found)
    assert describe(found).count(f"process {os.getpid()} on ") == 2
    lock.release()
    other.release()
    assert owners(tmp_path) == []


def test_the_text_alone_locks_nothing_and_damage_to_it_stops_nobody(tmp_path):
    owner = Claimant(1, "far", "", 0.0, "them", "exchanging")
    (tmp_path / "lock").write_text(json.dumps(vars(owner)) + '\n{"pid"\n\xff')
    assert owners(tmp_path) == []
    lock = CacheLock(tmp_path)
    assert lock.take("staging")
    lock.release()
    (tmp_path / "lock").write_text(json.dumps(vars(replace(owner, since_s=1e300))) + "\nno names\n")
    assert lock.join()
    assert [owner.pid for owner in owners(tmp_path)] == [os.getpid()]
    (tmp_path / "lock").write_text("")
    assert describe(owners(tmp_path)) == "a process that left no name"


def test_a_stopped_process_at_the_gate_is_an_error_and_no_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(dataio.store.lock, "GATE_TIMEOUT_S", 0.05)
    with gate(tmp_path):
        with pytest.raises(CacheBusyError, match=r"changing hands .* look for a stopped process"):
            CacheLock(tmp_path).take("staging")


def test_a_directory_that_was_removed_meanwhile_is_not_locked(tmp_path):
    directory = tmp_path / "node0"
    directory.mkdir()
    opened = os.open

    def swapped(path, flags, *rest, **where):
        descriptor = opened(path, flags, *rest, **where)
        if flags & os.O_DIRECTORY:
            directory.rmdir()
            directory.mkdir()
        return descriptor

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "open", swapped)
        with pytest.raises(FileNotFoundError, match="has been removed"):
            CacheLock(directory).take("staging")
    assert list(directory.iterdir()) == []

"""Real processes on one cache: shared, taken, killed, full, read-only, of another user."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from dataio.store.lock import owners
from dataio.store.tools.report import find_caches
from tests.dataio.source.shards import numbered, write_tar
from tests.multirank import ROOT, job_environ, python_command

SHARDS, ROWS = 4, 10
SAMPLES = SHARDS * ROWS
NUM_BYTES = sum(len(data) for name, data in numbered(SAMPLES) if name.endswith("bin"))
STRANGER = 65534


@pytest.fixture
def pattern(tmp_path):
    tmp_path.chmod(0o755)
    for shard in range(SHARDS):
        members = numbered(SAMPLES)[2 * ROWS * shard : 2 * ROWS * (shard + 1)]
        write_tar(tmp_path / f"train-{shard}.tar", members)
    return str(tmp_path / f"train-{{0..{SHARDS - 1}}}.tar")


@pytest.fixture
def start(pattern, tmp_path):
    """Starts jobs; ends those that still run."""
    jobs = []

    def begin(root=None, *, source=pattern, **options):
        jobs.append(RunningJob(root or tmp_path / "cache", source, options))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()


class RunningJob:
    """A process that opens a pool and does as it is told."""

    def __init__(self, root, pattern, options):
        self.rows_read = 0
        self.said = ""
        program = [*python_command(), "-m", "tests.ranks.cache_job"]
        self.process: Any = subprocess.Popen(
            [*program, str(root), pattern, json.dumps(options)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, bufsize=1, env=job_environ(),
        )  # fmt: skip
        self.pid: int = self.until("begin")["pid"]

    def until(self, event):
        """Read what it says up to an event, or a line with these words; pytest's limit ends it."""
        for line in self.process.stdout:
            self.said += line
            told = json.loads(line) if line.startswith("{") else {}
            self.rows_read += told.get("rows", 0)
            if told.get("event") == event or (not told and event in line):
                return told
        raise AssertionError(f"ended before {event!r}:\n{self.said}")

    def go_on(self, times=1):
        self.process.stdin.write("\n" * times)
        self.process.stdin.flush()

    def end(self):
        self.go_on()
        assert self.process.wait(30) == 0

    def kill(self):
        # A forked process may have ended while what stands for it has not yet.
        with contextlib.suppress(ProcessLookupError):
            if self.process.poll() is None:
                os.kill(self.pid, signal.SIGKILL)
        self.process.wait(30)
        self.process.stdin.close()
        self.process.stdout.close()


def node_names(root):
    return sorted(path.name for path in find_caches(root))


def test_two_jobs_at_once_read_each_shard_once_between_them(start, tmp_path):
    first = start(slow=True)
    first.until("block")
    second = start()
    second.until("waiting to share a cache")
    assert f"process {first.pid} on" in second.said
    assert "staging since" in second.said
    first.go_on(SHARDS)
    told = [first.until("ready"), second.until("ready")]
    assert (first.rows_read, second.rows_read) == (SAMPLES, 0)
    for report in told:
        assert report["shared"]
        assert report["num_bytes"] == NUM_BYTES
    assert told[0]["directory"] == told[1]["directory"]
    pids = {owner.pid for owner in owners(Path(told[0]["directory"]))}
    assert pids == {first.pid, second.pid}
    first.end()
    second.end()
    assert node_names(tmp_path / "cache") == ["node0"]


def test_a_killed_stager_is_replaced_by_the_job_that_waits_for_it(start, tmp_path):
    first = start(slow=True)
    first.until("block")
    second, third = start(), start()
    second.until("waiting to share a cache")
    third.until("waiting to share a cache")
    first.kill()
    told = [second.until("ready"), third.until("ready")]
    assert all(report["num_bytes"] == NUM_BYTES for report in told)
    assert second.rows_read + third.rows_read == SAMPLES
    assert node_names(tmp_path / "cache") == ["node0"]


def test_a_stager_that_gets_nowhere_is_named_when_the_wait_ends(start):
    first = start(slow=True)
    first.until("block")
    second = start(timeout_s=0.5)
    told = second.until("error")
    assert told["kind"] == "CacheStagingError"
    assert re.search(rf"in use by process {first.pid} on .*nothing was written", told["error"])


@pytest.mark.parametrize("exchanging", [False, True])
def test_a_lock_dies_with_its_owner(start, tmp_path, exchanging):
    first = start(exchanging=exchanging, scores=True)
    told = first.until("ready")
    directory = Path(told["directory"])
    assert [owner.pid for owner in owners(directory)] == [first.pid]
    first.kill()
    assert owners(directory) == []
    assert not list(directory.glob("scores*")), "not even the scores are left"
    again = start(exchanging=True)
    assert again.until("ready")["directory"] == told["directory"]
    assert again.rows_read == 0


def test_who_exchanges_has_a_cache_of_its_own_and_says_why(start, tmp_path):
    reader = start()
    shared = reader.until("ready")
    trader = start(exchanging=True)
    own = trader.until("ready")
    assert not own["shared"]
    assert own["directory"] == shared["directory"] + ".1"
    assert f"in use by process {reader.pid} on" in trader.said
    other = start(exchanging=True)
    assert other.until("ready")["directory"] == shared["directory"] + ".2"
    late = start()
    assert late.until("ready")["directory"] == shared["directory"], "readers share the first"
    assert late.rows_read == 0
    trader.end()
    again = start(exchanging=True)
    assert again.until("ready")["directory"] == own["directory"], "it is used again"
    assert again.rows_read == 0
    assert node_names(tmp_path / "cache") == ["node0", "node0.1", "node0.2"]


def test_who_only_reads_leaves_an_exchanging_job_alone(start):
    trader = start(exchanging=True)
    taken = trader.until("ready")["directory"]
    reader, other = start(), None
    own = reader.until("ready")
    assert own["directory"] == taken + ".1"
    assert f"in use by process {trader.pid} on" in reader.said
    assert "exchanging since" in reader.said
    other = start()
    assert other.until("ready")["directory"] == own["directory"]
    assert other.rows_read == 0


def test_scores_leave_no_file_and_none_is_made_without(start):
    for scores in (False, True):
        job = start(scores=scores)
        assert not [name for name in job.until("ready")["names"] if "scores" in name]
        job.end()


@contextlib.contextmanager
def mounted(directory, *options):
    """A mount of its own, where the machine allows it."""
    if os.getuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root may mount")
    directory.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", *options, str(directory)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def test_a_whole_cache_on_a_read_only_disk_is_read_with_scores_elsewhere(
    start, tmp_path, monkeypatch
):
    monkeypatch.setenv("TONARI_CACHE", str(tmp_path / "default"))
    job = start()
    names = job.until("ready")["names"]
    job.end()
    with mounted(tmp_path / "frozen", "-o", "bind,ro", str(tmp_path / "cache")) as frozen:
        first = start(frozen, scores=True)
        told = first.until("ready")
        assert (told["shared"], told["num_bytes"], told["names"]) == (True, NUM_BYTES, names)
        assert first.rows_read == 0
        second = start(frozen)
        assert second.until("ready")["directory"] == told["directory"]
        trader = start(frozen, exchanging=True)
        assert f"{frozen} is not writable for user 0" in trader.until("error")["error"]
        first.end()
        second.end()
    assert list((tmp_path / "default").glob("**/scores*")) == []


def test_a_read_only_disk_without_the_rows_is_one_message(start, tmp_path):
    (tmp_path / "cache").mkdir()
    with mounted(tmp_path / "frozen", "-o", "bind,ro", str(tmp_path / "cache")) as frozen:
        told = start(frozen).until("error")["error"]
    assert re.search(r"not writable for user 0.*holds no cache of this.*give another dir", told)


def test_a_full_disk_is_one_message_and_the_job_goes_on_when_there_is_room(start, tmp_path):
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=96k", "tmpfs") as small:
        for _ in range(2):
            job = start(small)
            told = job.until("error")
            assert told["kind"] == "CacheError"
            assert re.search(r"No space left on device|needs .*free", told["error"])
            assert "free some space or give another directory" in told["error"]
        subprocess.run(["mount", "-o", "remount,size=8m", str(small)], check=True)
        job = start(small)
        assert job.until("ready")["num_bytes"] == NUM_BYTES
        job.kill()
        assert node_names(small) == ["node0"]


def opened_for_all(root):
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.fixture
def theirs(start, pattern, monkeypatch):
    """A whole cache that a stranger may read, and how to start jobs on it."""
    if os.getuid() != 0:
        pytest.skip("only root may become another user")
    # pytest's own directories are closed to strangers.
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    for shard in Path(pattern).parent.glob("*.tar"):
        shutil.copy(shard, place)
    (place / "stranger").mkdir()
    os.chown(place / "stranger", STRANGER, STRANGER)
    monkeypatch.setenv("TONARI_CACHE", str(place / "stranger"))

    def begin(**options):
        return start(place / "cache", source=str(place / Path(pattern).name), **options)

    job = begin()
    job.until("ready")
    job.end()
    opened_for_all(place / "cache")
    yield place / "cache", begin
    shutil.rmtree(place)


def test_two_users_share_a_cache_that_is_named(theirs):
    _, begin = theirs
    owner = begin()
    directory = owner.until("ready")["directory"]
    stranger = begin(uid=STRANGER, foreign=True, scores=True)
    told = stranger.until("ready")
    assert (told["directory"], told["shared"]) == (directory, True)
    assert told["num_bytes"] == NUM_BYTES
    assert stranger.rows_read == 0
    owner.end()
    trader = begin(exchanging=True)
    assert trader.until("ready")["directory"] == directory + ".1", "the stranger still reads it"


def test_another_users_cache_is_not_used_unless_named(theirs):
    root, begin = theirs
    before = sorted(root.rglob("*"))
    told = begin(uid=STRANGER).until("error")["error"]
    assert re.search(r"not writable for user 65534.*belongs to user 0.*make it writable", told)
    root.chmod(0o1777)
    job = begin(uid=STRANGER)
    own = job.until("ready")
    assert own["directory"].endswith("-65534/node0"), "its own, beside"
    assert job.rows_read == SAMPLES
    new = [path for path in sorted(root.rglob("*")) if path not in before]
    assert {path.stat().st_uid for path in new} == {STRANGER}


def test_another_users_cache_cannot_be_exchanged_in(theirs):
    _, begin = theirs
    told = begin(uid=STRANGER, foreign=True, exchanging=True).until("error")["error"]
    words = r"not writable for user 65534.*belongs to user 0, and only its owner may exchange rows"
    assert re.search(words, told)


def test_a_cache_that_its_owner_keeps_closed_is_one_message(theirs):
    root, begin = theirs
    next(root.glob("*/node0")).chmod(0o700)
    told = begin(uid=STRANGER, foreign=True).until("error")["error"]
    assert re.search(r"not writable for user 65534.*Permission denied", told)

"""A cache root in which others write: what they plant is neither trained nor written to."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest

import dataio.base.own
from dataio.base.errors import CacheError
from dataio.base.filesystem import cache_directory
from dataio.base.own import TRUST_VARIABLE
from dataio.source.counts import own_directory, read_counts, write_counts
from dataio.source.storage.throttle import Throttle
from dataio.store.lock import CacheLock
from dataio.world import single_world
from tests.dataio.store.test_choice import SAMPLES, intact, open_pool

VICTIM, ATTACKER = 12345, 54321
PRECIOUS = b"do not lose me\n" * 20


def stage(root, **options):
    """Stage a pool, or share it: the rows it read from the source, and its directory."""
    pool, wanted = open_pool(single_world(), root, **options)
    with contextlib.closing(pool):
        pool.ensure(wanted)
        assert intact(pool, wanted)
        return len(pool.source.rows_read), pool.cache.directory


@pytest.fixture
def node(tmp_path):
    """The directory of a whole cache, and a file that must stay as it is."""
    (tmp_path / "precious").write_bytes(PRECIOUS)
    return stage(tmp_path / "root")[1]


def link(path):
    path.unlink(missing_ok=True)
    path.symlink_to(path.parents[3] / "precious")


def hard_link(path):
    path.unlink(missing_ok=True)
    os.link(path.parents[3] / "precious", path)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def moved_behind_link(path):
    elsewhere = path.parents[1] / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


PLANTED = {
    "a lock that is a link": lambda node: link(node / "lock"),
    "a lock with two names": lambda node: hard_link(node / "lock"),
    "a lock that is a pipe": lambda node: pipe(node / "lock"),
    "a lock that all may write": lambda node: (node / "lock").chmod(0o666),
    "rows that are a link": lambda node: link(node / "fixed-0.npy"),
    "rows with two names": lambda node: hard_link(node / "fixed-0.npy"),
    "new rows that are a link": lambda node: link(node / "heap-7.bin"),
    "half a file that is a link": lambda node: link(node / "meta.json.partial"),
    "half a file with two names": lambda node: hard_link(node / "manifest.json.partial"),
    "a manifest that all may write": lambda node: (node / "manifest.json").chmod(0o646),
    "a node that all may write": lambda node: node.chmod(0o777),
    "a node that all may write, sticky": lambda node: node.chmod(0o1777),
    "a dataset that all may write": lambda node: node.parent.chmod(0o777),
    "a node behind a link": moved_behind_link,
    "a dataset behind a link": lambda node: moved_behind_link(node.parent),
}


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_planted_in_a_cache_is_refused_and_left_alone(node, tmp_path, what):
    PLANTED[what](node)
    with pytest.raises(CacheError, match=r"root/.*found owner .* mode \d+, expected .*remove it"):
        stage(tmp_path / "root")
    assert (tmp_path / "precious").read_bytes() == PRECIOUS
    with pytest.raises(CacheError):
        stage(tmp_path / "root", num_leaving=2)
    assert (tmp_path / "precious").read_bytes() == PRECIOUS


def test_a_group_that_is_not_the_users_alone_may_not_write(node, tmp_path, monkeypatch):
    node.chmod(0o770)
    monkeypatch.setattr(dataio.base.own, "_is_group_of_one", lambda _: True)
    assert stage(tmp_path / "root")[0] == 0
    monkeypatch.setattr(dataio.base.own, "_is_group_of_one", lambda _: False)
    with pytest.raises(CacheError, match=r"may be written by others, found .* mode 0770"):
        stage(tmp_path / "root")
    monkeypatch.setenv(TRUST_VARIABLE, "1")
    assert stage(tmp_path / "root")[0] == 0


def test_a_root_in_which_others_can_replace_directories_is_refused(tmp_path, monkeypatch):
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(CacheError, match=r"mode 0777: other users could replace.*chmod \+t"):
        cache_directory(str(root))
    root.chmod(0o1777)
    assert cache_directory(str(root)) == root
    root.chmod(0o777)
    monkeypatch.setenv(TRUST_VARIABLE, "1")
    assert cache_directory(str(root)) == root


def test_a_default_root_that_is_a_link_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("TONARI_CACHE", raising=False)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(dataio.base.filesystem, "_scratch_directory", lambda: scratch / "tonari-0")
    (tmp_path / "home").mkdir()
    (scratch / "tonari-0").symlink_to(tmp_path / "home")
    with pytest.raises(CacheError, match=r"tonari-0 is a symbolic link of user \d+"):
        cache_directory("auto")
    # One that somebody named may be one.
    assert cache_directory(str(scratch / "tonari-0")) == scratch / "tonari-0"


@pytest.mark.parametrize("level", [0, 1])
def test_a_directory_that_is_swapped_after_its_check_is_not_followed(
    node, tmp_path, monkeypatch, level
):
    """As by one who may rename in the root: the lock of another place is not touched."""
    other = tmp_path / "other" / node.name
    other.mkdir(parents=True)
    (other / "lock").write_bytes(PRECIOUS)
    checked = dataio.base.own._check_files
    swapped = (node, node.parent)[level]

    def check_then_swap(*given, **options):
        checked(*given, **options)
        swapped.rename(tmp_path / "away")
        swapped.symlink_to(other if level == 0 else other.parent)

    monkeypatch.setattr(dataio.base.own, "_check_files", check_then_swap)
    with pytest.raises(CacheError, match="is no directory, found owner"):
        stage(tmp_path / "root")
    assert (other / "lock").read_bytes() == PRECIOUS


def test_a_planted_count_of_samples_is_not_believed(tmp_path, caplog):
    directory = own_directory(tmp_path)
    assert directory is not None
    write_counts(directory, ["a.tar"], [])
    assert read_counts(directory, ["a.tar"]) == []
    (file,) = directory.iterdir()
    file.chmod(0o666)
    assert read_counts(directory, ["a.tar"]) is None
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert read_counts(directory, ["a.tar"]) is None
    assert caplog.text.count("cannot be read") == 2


def test_a_throttle_is_no_link_to_another_file(tmp_path):
    (tmp_path / "precious").write_bytes(PRECIOUS)
    (tmp_path / "throttle").symlink_to(tmp_path / "precious")
    with pytest.raises(CacheError, match="throttle: is a symbolic link"):
        Throttle(tmp_path / "throttle").take(1)
    assert (tmp_path / "precious").read_bytes() == PRECIOUS


@contextlib.contextmanager
def user(uid):
    """Be another user for a while; all that is imported late was imported before."""
    groups = os.getgroups()
    os.setgroups([])
    os.setresgid(uid, uid, 0)
    os.setresuid(uid, uid, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)
        os.setgroups(groups)


@pytest.fixture
def common():
    """A root as /tmp is, and a place beside it, that all may enter."""
    if os.getuid() != 0:
        pytest.skip("only root may become another user")
    place = Path(tempfile.mkdtemp(prefix="tonari-hostile-"))
    place.chmod(0o755)
    for name in ("root", "attackers"):
        (place / name).mkdir()
        (place / name).chmod(0o1777)
    stage(place / "warm")
    yield place
    shutil.rmtree(place)


def prepared(common, target, *, closed):
    """Have the attacker prepare a whole cache of the victim's dataset, where it will look."""
    with user(ATTACKER):
        _, made = stage(common / "attackers")
        target = common / "root" / target.format(made.parent.name)
        shutil.copytree(made.parent, target)
        for path in (target, *target.rglob("*")):
            path.chmod((0o755 if closed else 0o777) if path.is_dir() else 0o644)
    return target


@pytest.mark.parametrize("closed", [False, True])
def test_a_cache_that_another_user_prepared_is_not_trained(common, closed, caplog, monkeypatch):
    theirs = prepared(common, "{}", closed=closed)
    with user(VICTIM):
        num_read, directory = stage(common / "root", foreign=True)
    assert (num_read, directory.parent.name) == (SAMPLES, f"{theirs.name}-{VICTIM}")
    assert f"belongs to user {ATTACKER}, who is neither this one, nor root" in caplog.text
    monkeypatch.setenv(TRUST_VARIABLE, "1")
    with user(VICTIM):
        assert stage(common / "root", foreign=True) == (0, theirs / "node0")


def test_a_directory_that_another_user_made_in_this_ones_name_is_refused(common):
    prepared(common, "{}", closed=True)
    prepared(common, f"{{}}-{VICTIM}", closed=False)
    with (
        user(VICTIM),
        pytest.raises(CacheError, match=rf"-{VICTIM}: is another user's.*{ATTACKER}"),
    ):
        stage(common / "root", foreign=True)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_lock_in_another_users_directory_reaches_no_file_of_this_one(common, link):
    theirs = prepared(common, f"{{}}-{VICTIM}", closed=False)
    precious = common / "precious"
    precious.write_bytes(PRECIOUS)
    os.chown(precious, VICTIM, VICTIM)
    lock = theirs / "node0" / "lock"
    lock.unlink()
    link(precious, lock)
    prepared(common, "{}", closed=True)
    with user(VICTIM):
        with pytest.raises(CacheError, match="is another user's"):
            stage(common / "root")
        with pytest.raises(CacheError, match=r"symbolic link|hard links"):
            CacheLock(theirs / "node0").take("staging")
    assert precious.read_bytes() == PRECIOUS


def test_a_cache_of_whom_the_named_root_belongs_to_is_read(common):
    theirs = prepared(common, "{}", closed=True)
    os.chown(common / "root", ATTACKER, ATTACKER)
    (common / "root").chmod(0o755)
    with user(VICTIM):
        assert stage(common / "root", foreign=True) == (0, theirs / "node0")
    # But for what others may write.
    (theirs / "node0" / "headers.npy").chmod(0o666)
    with user(VICTIM), pytest.raises(CacheError, match=r"headers\.npy: may be written by others"):
        stage(common / "root", foreign=True)


def test_counts_of_another_user_are_not_believed(common, caplog):
    root = common / "root"
    with user(ATTACKER):
        for name in ("indexes", f"indexes-{VICTIM}"):
            (root / name).mkdir()
            (root / name).chmod(0o777)
    with user(VICTIM):
        assert own_directory(root) is None
    assert "is not this user's own" in caplog.text

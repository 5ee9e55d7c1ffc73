"""Two users of one common cache root, as /tmp is: each starts, and takes nothing of the other's."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dataio.source import counts, open_source
from tests.dataio.source.shards import numbered, write_tar
from tests.multirank import ROOT

FIRST, SECOND = 54321, 54322

PROGRAM = """
import json, os, sys
from dataio import Bytes, Int, Loader, Reports, Workers

uid, shards, cache, warm = int(sys.argv[1]), *sys.argv[2:]

def train(cache):
    fields = {"data": Bytes("bin"), "number": Int("cls")}
    with Loader(shards, batch_size=4, fields=fields, cache=cache,
                workers=Workers(threads=0), reports=Reports(progress=False)) as loader:
        ids = [i for _ in loader.epochs(1) for batch in loader for i in batch["number"].tolist()]
        return sorted(ids), loader.stats()["staging_s"]

# All is imported by then: the other user cannot read where Python lies.
os.umask(0o022)
train(warm)
os.setgroups([])
os.setgid(uid)
os.setuid(uid)
ids, staging_s = train(cache)
print(json.dumps({"ids": ids, "staged": staging_s > 0}))
"""


@pytest.fixture
def common():
    """A directory that every user may enter: shards, and a cache root as /tmp is."""
    if os.getuid() != 0:
        pytest.skip("only root may become another user")
    directory = Path(tempfile.mkdtemp(prefix="tonari-users-"))
    directory.chmod(0o755)
    write_tar(directory / "0.tar", numbered(20))
    (directory / "0.tar").chmod(0o644)
    (directory / "cache").mkdir()
    (directory / "cache").chmod(0o1777)
    yield directory
    shutil.rmtree(directory)


def run_as(uid: int, common: Path, tmp_path: Path) -> tuple[int, str]:
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        str(uid),
        str(common / "0.tar"),
        str(common / "cache"),
    ]
    ended = subprocess.run(
        [*command, str(tmp_path / f"own-{uid}")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TONARI_CACHE": str(common / "cache")},
        timeout=120, capture_output=True, text=True,
    )  # fmt: skip
    return ended.returncode, ended.stdout + ended.stderr


def test_a_second_user_starts_on_a_common_cache_root(common, tmp_path):
    for uid in (FIRST, SECOND, SECOND):
        status, said = run_as(uid, common, tmp_path)
        assert status == 0, said
        assert json.loads(said.splitlines()[-1])["ids"] == list(range(20))
    # All was there the second time: the index too, whose directory is the user's own.
    assert not json.loads(said.splitlines()[-1])["staged"]
    found = {path.name: path.stat() for path in (common / "cache").iterdir()}
    indexes = {name: stat.st_uid for name, stat in found.items() if name.startswith("indexes")}
    assert indexes == {"indexes": FIRST, f"indexes-{SECOND}": SECOND}
    assert {stat.st_mode & 0o777 for stat in found.values()} == {0o700}
    assert [stat.st_uid for stat in found.values()].count(FIRST) == 2


def test_an_index_directory_of_another_user_is_not_looked_at(tmp_path, caplog):
    (tmp_path / "cache" / "indexes").mkdir(parents=True)
    root, own = tmp_path / "cache", os.getuid()
    assert counts.own_directory(root) == root / "indexes"
    (root / "indexes").chmod(0o777)  # As good as another's: whoever wants to may write there.
    assert counts.own_directory(root) == root / f"indexes-{own}"
    (root / f"indexes-{own}").rename(tmp_path / "elsewhere")
    (root / f"indexes-{own}").symlink_to(tmp_path / "elsewhere")
    assert counts.own_directory(root) is None
    assert f"indexes-{own}: is not this user's own" in caplog.text


def test_an_index_that_cannot_be_read_is_made_anew(tmp_path, monkeypatch, caplog):
    write_tar(tmp_path / "0.tar", numbered(20))
    open_source(str(tmp_path / "0.tar"), index_cache=tmp_path / "indexes")
    read = Path.read_bytes

    def refused(path: Path) -> bytes:
        if path.suffix == ".survey":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refused)
    source = open_source(str(tmp_path / "0.tar"), index_cache=tmp_path / "indexes")
    assert source.num_samples == 20
    assert "cannot be read" in caplog.text

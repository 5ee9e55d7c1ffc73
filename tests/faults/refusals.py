"""A small dataset, the commands over it, and how they refuse."""

import contextlib
import os
import re
import shutil
import subprocess
from typing import Any

import pytest

from dataio import (
    Bytes,
    Int,
    Loader,
    Reports,
    Workers,
)
from dataio.world import single_world
from tonari import cli

FIELDS = {"data": Bytes("bin"), "number": Int("cls")}


FLAGS = ["--fields", "data=bytes:bin", "number=int:cls"]


SAMPLES = 12


GOOD = {number: (number + 1).to_bytes(4, "little") * (750 + number % 5) for number in range(12)}


def make(source, cache, *, world=None, **options):
    chosen: dict[str, Any] = {
        "batch_size": 3,
        "fields": FIELDS,
        "workers": Workers(threads=0),
        "reports": Reports(progress=False),
    } | options
    world = world if world is not None else single_world()
    return Loader(source, cache=cache, world=world, **chosen)


def rows_of(loader):
    """The data of every row of an epoch, by number."""
    found = {}
    for batch in loader:
        for slot, number, data in zip(
            batch["slot"].tolist(), batch["number"].tolist(), batch["data"], strict=True
        ):
            if slot >= 0:
                found[number] = data
    return found


def assert_works(shard, cache, expected=GOOD):
    """The same cache directory serves a good run, which gets what the source holds."""
    with make(str(shard), cache) as loader:
        assert rows_of(loader) == expected


def refused(capsys, argv, *words, status=1):
    """The command ends with this status and one line that says all this, in this order."""
    assert cli.main([str(word) for word in argv]) == status
    said = capsys.readouterr()
    assert said.err.count("\n") == 1, said.err
    assert said.err.startswith("tonari ")
    assert re.search(".*".join(words), said.err), said.err
    assert said.out == ""


def stage(source, cache):
    return ["cache", "stage", source, *FLAGS, "--cache", cache]


@contextlib.contextmanager
def mounted(directory, *options):
    """A filesystem of its own, where the machine allows it."""
    directory.mkdir(exist_ok=True)
    command = ["mount", *options, str(directory)]
    if os.getuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root may mount")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)

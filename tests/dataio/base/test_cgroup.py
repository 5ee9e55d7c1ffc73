"""How much memory is left, by recorded cgroup trees of both versions."""

import os

import pytest

from dataio.base.cgroup import memory_limit, memory_room

MEMINFO = "MemTotal: 8000 kB\nMemFree: 10 kB\nMemAvailable: 4000 kB\n"
NAMES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def tree(tmp_path, version, levels, *, root="/"):
    """A fake /proc and cgroup mount; `levels` maps a path to (limit, usage, inactive)."""
    mount = tmp_path / "cgroup"
    for path, (limit, usage, inactive) in levels.items():
        directory = mount / path.lstrip("/")
        directory.mkdir(parents=True, exist_ok=True)
        limit_name, usage_name, inactive_name = NAMES[version]
        (directory / limit_name).write_text(f"{limit}\n")
        (directory / usage_name).write_text(f"{usage}\n")
        (directory / "memory.stat").write_text(f"anon 5\n{inactive_name} {inactive}\n")
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(MEMINFO)
    leaf = "/job/step"
    own = f"0::{leaf}\n" if version == 2 else f"5:cpu:/x\n4:memory:{leaf}\n0::/\n"
    (proc / "self" / "cgroup").write_text(own)
    kind = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,memory"
    (proc / "self" / "mountinfo").write_text(
        f"22 1 0:1 / /proc rw - proc proc rw\n31 1 0:2 {root} {mount} rw - {kind}\n"
    )
    return proc


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_limit_on_the_way_up_counts(tmp_path, version):
    none = "max" if version == 2 else str(2**63 - 4096)
    levels = {"/job/step": (none, 100, 0), "/job": (5000, 3000, 600), "/": (9000, 3000, 0)}
    assert memory_room(tree(tmp_path, version, levels)) == 5000 - 3000 + 600


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_sees_its_own_cgroup_at_the_mount(tmp_path, version):
    levels = {"/step": (700, 200, 0), "/": (10**9, 0, 0)}
    assert memory_room(tree(tmp_path, version, levels, root="/job")) == 500


def test_without_limits_the_machines_memory_counts(tmp_path):
    assert memory_room(tree(tmp_path, 2, {"/job/step": ("max", 1, 0)})) == 4000 * 1024


def test_usage_above_the_limit_leaves_nothing(tmp_path):
    assert memory_room(tree(tmp_path, 2, {"/job/step": (100, 300, 0)})) == 0


def test_without_anything_told_nothing_is_known(tmp_path):
    assert memory_room(tmp_path) is None


@pytest.mark.parametrize("version", [1, 2])
def test_the_least_limit_counts_whatever_is_in_use(tmp_path, version):
    none = "max" if version == 2 else str(2**63 - 4096)
    levels = {"/job/step": (none, 100, 0), "/job": (5000, 3000, 600), "/": (4000, 10, 0)}
    assert memory_limit(tree(tmp_path, version, levels)) == 4000


def test_this_machine_tells():
    room = memory_room()
    assert room is None or room > 0
    assert 0 < memory_limit() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

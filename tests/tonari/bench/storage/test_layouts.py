"""Lustre's and GPFS' layouts, read from what their tools print and from the attribute itself."""

import os
import struct
from pathlib import Path

import pytest

from tonari.bench.storage.site.gpfs import gpfs_layout
from tonari.bench.storage.site.layouts import run_tool
from tonari.bench.storage.site.lustre import (
    count_osts,
    lustre_layout,
    parse_attribute,
    parse_getstripe,
)

RECORDED = Path(__file__).parent / "recorded"
END = (1 << 64) - 1


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


def plain(
    count: int, stripe: int, *, osts=(), pool: bytes | None = None, pattern: int = 1
) -> bytes:
    """Lay out a plain layout: magic, pattern, object id, stripe size, count, offset, pool, OSTs."""
    magic = 0x0BD10BD0 if pool is None else 0x0BD30BD0
    head = struct.pack("<IIQQIHH", magic, pattern, 7, 9, stripe, count, 0)
    named = b"" if pool is None else pool.ljust(16, b"\0")
    return head + named + b"".join(struct.pack("<QQII", 1, 2, 3, ost) for ost in osts)


def composite(*entries: tuple[int, int, int, bytes]) -> bytes:
    """Lay out a composite one; entries: flags, start, end, plain layout."""
    at = 32 + 48 * len(entries)
    listed = layouts = b""
    for number, (flags, start, end, layout) in enumerate(entries):
        offset = at + len(layouts)
        listed += struct.pack(
            "<IIQQIIIQI", number + 1, flags, start, end, offset, len(layout), 0, 0, 0
        )
        layouts += layout
    size = at + len(layouts)
    head = struct.pack("<IIIHHHHHHQ", 0x0BD60BD0, size, 2, 0, len(entries), 0, 0, 0, 0, 0)
    return head + listed + layouts


def test_a_plain_layout_is_read_from_what_the_tool_prints():
    layout = parse_getstripe(recorded("getstripe_plain.txt"))
    assert layout is not None
    assert (layout.stripe_count, layout.stripe_bytes) == (3, 2 << 20)
    assert layout.osts == (11, 4, 7)
    assert layout.pool == "flash"
    assert (layout.said_by, layout.dom_bytes, len(layout.components)) == ("lfs", 0, 1)


def test_a_progressive_layout_with_data_on_the_metadata_server_is_read_in_its_components():
    layout = parse_getstripe(recorded("getstripe_progressive.txt"))
    assert layout is not None
    first, second, third = layout.components
    assert (first.on_mdt, first.start_bytes, first.end_bytes) == (True, 0, 262144)
    assert (second.on_mdt, second.stripe_count, second.osts) == (False, 1, (5,))
    assert (third.start_bytes, third.end_bytes, third.osts) == (8 << 20, None, ())
    assert layout.dom_bytes == 262144
    # The widest says how new data are spread: over all OSTs.
    assert (layout.stripe_count, layout.stripe_bytes, layout.pool) == (-1, 4 << 20, "capacity")


def test_the_default_of_a_directory_is_read_from_one_line():
    layout = parse_getstripe(recorded("getstripe_directory.txt"))
    assert layout is not None
    assert (layout.stripe_count, layout.stripe_bytes, layout.osts) == (8, 1 << 20, ())


@pytest.mark.parametrize("printed", ["", "no stripe info\n", "lcme_id: 1\n", "stripe_count N/A\n"])
def test_output_without_a_layout_is_none(printed):
    assert parse_getstripe(printed) is None


def test_odd_values_do_not_stop_the_reading():
    layout = parse_getstripe("lmm_stripe_count: 65535\nlmm_stripe_size: N/A\nlmm_pattern: 100\n")
    assert layout is not None
    assert (layout.stripe_count, layout.stripe_bytes) == (-1, 0)
    assert layout.components[0].on_mdt


def test_the_attribute_of_a_plain_file_tells_the_same_as_the_tool():
    layout = parse_attribute(plain(3, 2 << 20, osts=(11, 4, 7), pool=b"flash"))
    told = parse_getstripe(recorded("getstripe_plain.txt"))
    assert layout is not None
    assert told is not None
    assert layout.components == told.components
    assert layout.said_by == "xattr"


def test_the_attribute_without_a_pool_names_its_osts():
    layout = parse_attribute(plain(2, 65536, osts=(300, 1)))
    assert layout is not None
    assert (layout.osts, layout.pool, layout.stripe_bytes) == ((300, 1), None, 65536)


def test_the_attribute_of_a_progressive_file_tells_the_same_as_the_tool():
    layout = parse_attribute(
        composite(
            (0x10, 0, 262144, plain(0, 262144, pattern=0x100)),
            (0x10, 262144, 8 << 20, plain(1, 1 << 20, osts=(5,))),
            (0, 8 << 20, END, plain(0xFFFF, 4 << 20, pool=b"capacity")),
        )
    )
    told = parse_getstripe(recorded("getstripe_progressive.txt"))
    assert layout is not None
    assert told is not None
    assert layout.components == told.components
    assert (layout.dom_bytes, layout.stripe_count) == (told.dom_bytes, told.stripe_count)


def test_a_component_that_is_not_yet_written_names_no_osts():
    garbage = plain(1, 1 << 20, osts=(4242,))
    layout = parse_attribute(composite((0, 0, END, garbage)))
    assert layout is not None
    assert layout.osts == ()


@pytest.mark.parametrize("length", [0, 3, 20, 40, 90])
def test_an_attribute_cut_short_is_none(length):
    whole = composite((0x10, 0, END, plain(1, 1 << 20, osts=(5,))))
    assert parse_attribute(whole) is not None
    assert parse_attribute(whole[:length]) is None


def test_an_attribute_of_another_kind_is_none():
    assert parse_attribute(struct.pack("<I", 0x0BD70BD0) + bytes(64)) is None


def test_osts_of_the_filesystem_are_counted_without_those_that_are_away():
    assert count_osts(recorded("lfs_df.txt")) == 3
    assert count_osts("lfs: no such filesystem\n") is None


def test_without_the_tool_the_attribute_tells(monkeypatch, tmp_path):
    def read(path: Path, name: str) -> bytes:
        assert (path, name) == (tmp_path, "lustre.lov")
        return plain(4, 1 << 20)

    monkeypatch.setattr("os.getxattr", read)
    layout = lustre_layout(tmp_path, run=lambda command: None)
    assert layout is not None
    assert (layout.said_by, layout.stripe_count, layout.num_osts) == ("xattr", 4, None)


def test_without_tool_and_attribute_nothing_tells(tmp_path):
    assert lustre_layout(tmp_path, run=lambda command: None) is None


def test_pool_and_replicas_are_read_from_what_mmlsattr_prints(tmp_path):
    asked = []

    def run(command):
        asked.append(command)
        return recorded("mmlsattr.txt")

    layout = gpfs_layout(tmp_path, block_bytes=16 << 20, run=run)
    assert layout is not None
    assert (layout.pool, layout.data_replicas, layout.fileset) == ("nvme1", 1, "work")
    assert (layout.block_bytes, layout.said_by) == (16 << 20, "mmlsattr")
    assert asked == [["mmlsattr", "-L", str(tmp_path)]]


@pytest.mark.parametrize("printed", [None, "", "mmlsattr: not a GPFS file\n"])
def test_without_an_answer_of_mmlsattr_the_layout_is_unknown(printed, tmp_path):
    assert gpfs_layout(tmp_path, block_bytes=4096, run=lambda command: printed) is None


def test_a_tool_that_is_absent_or_fails_says_nothing(tmp_path):
    assert run_tool([str(tmp_path / "absent")]) is None
    assert run_tool(["false"]) is None
    assert run_tool(["echo", "told"]) == "told\n"


def test_a_tool_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr("tonari.bench.storage.site.layouts.TOOL_TIMEOUT_S", 0.2)
    read_end, write_end = os.pipe()
    try:
        assert run_tool(["cat", f"/proc/{os.getpid()}/fd/{read_end}"]) is None
    finally:
        os.close(read_end)
        os.close(write_end)

"""Read Lustre's layout from ``lfs getstripe -y``, or the ``lustre.lov`` attribute."""

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from tonari.bench.storage.site.layouts import ALL_OSTS, Component, RunTool, StripeLayout

PLAIN, PLAIN_WITH_POOL, ON_THESE_OSTS, COMPOSITE = 0x0BD10BD0, 0x0BD30BD0, 0x0BD50BD0, 0x0BD60BD0
ON_MDT = 0x100
INSTANTIATED = 0x10
END_OF_FILE = (1 << 64) - 1
EVERY_OST = (ALL_OSTS, 0xFFFF, 0xFFFFFFFF)
"""Tools of different age print the one value by different widths."""

HEADER = struct.Struct("<II16xIHH")
"""Of a plain layout: magic, pattern, stripe size, stripe count, first OST."""
POOL_BYTES = 16
OBJECT = struct.Struct("<20xI")
"""Of each stripe: its OST's number."""
COMPOSITE_HEADER = struct.Struct("<IIIHH16x")
"""Magic, size, generation, flags, number of entries."""
ENTRY = struct.Struct("<IIQQII16x")
"""Id, flags, start, end, where its plain layout lies, and how long that is."""

PAIR = re.compile(r"([A-Za-z_][\w.]*):[ \t]*([^\s,{}]+)")


def lustre_layout(path: Path, *, run: RunTool) -> StripeLayout | None:
    """Find how a file, or a new file in a directory, lies on Lustre; None if unknown.

    The tool first, because it alone knows what a directory inherits.
    """
    printed = run(["lfs", "getstripe", "-y", "-d", str(path)])
    layout = parse_getstripe(printed) if printed else None
    if layout is None:
        layout = _layout_of_attribute(path)
    if layout is None:
        return None
    return replace(layout, num_osts=count_osts(run(["lfs", "df", str(path)]) or ""))


def parse_getstripe(printed: str) -> StripeLayout | None:
    """Read what ``lfs getstripe`` prints, with -y or without; None if no layout is in it."""
    components = tuple(_component(pairs) for pairs in _groups(printed))
    return _layout(components, "lfs") if components else None


def parse_attribute(attribute: bytes) -> StripeLayout | None:
    """Read the ``lustre.lov`` attribute; None if it is of a kind not known here, or cut short."""
    try:
        components = tuple(_components(attribute))
    except struct.error:
        return None
    return _layout(components, "xattr") if components else None


def count_osts(printed: str) -> int | None:
    """Count the OSTs in what ``lfs df`` prints; None where it names none."""
    return len(set(re.findall(r"\[OST:(\w+)\]", printed))) or None


def _layout_of_attribute(path: Path) -> StripeLayout | None:
    try:
        return parse_attribute(os.getxattr(path, "lustre.lov"))
    except OSError:
        # A directory without a layout of its own has none.
        return None


def _layout(components: tuple[Component, ...], said_by: Literal["lfs", "xattr"]) -> StripeLayout:
    on_osts = [each for each in components if not each.on_mdt] or list(components)
    widest = max(on_osts, key=lambda each: (each.stripe_count == ALL_OSTS, each.stripe_count))
    osts = dict.fromkeys(ost for each in components for ost in each.osts)
    return StripeLayout(
        kind="lustre", said_by=said_by, stripe_count=widest.stripe_count,
        stripe_bytes=widest.stripe_bytes, osts=tuple(osts), components=components,
        dom_bytes=max((each.end_bytes or 0 for each in components if each.on_mdt), default=0),
        pool=widest.pool,
    )  # fmt: skip


def _groups(printed: str) -> Iterator[dict[str, list[str]]]:
    """Gather the printed pairs of each component; those of a plain layout are one."""
    group: dict[str, list[str]] = {}
    for name, value in PAIR.findall(printed):
        if name == "lcme_id":
            if "stripe_count" in group:
                yield group
            group = {}
        group.setdefault(name.removeprefix("lmm_"), []).append(value)
    if "stripe_count" in group:
        yield group


def _component(pairs: dict[str, list[str]]) -> Component:
    pattern = pairs.get("pattern", ["raid0"])[0]
    stripe_count = _number(pairs["stripe_count"][0]) or 0
    return Component(
        start_bytes=_number(*pairs.get("lcme_extent.e_start", [])) or 0,
        end_bytes=_number(*pairs.get("lcme_extent.e_end", [])),
        on_mdt=pattern in ("mdt", "100"),
        stripe_count=ALL_OSTS if stripe_count in EVERY_OST else stripe_count,
        stripe_bytes=_number(*pairs.get("stripe_size", [])) or 0,
        osts=tuple(ost for ost in map(_number, pairs.get("l_ost_idx", [])) if ost is not None),
        pool=pairs["pool"][0] if "pool" in pairs else None,
    )


def _number(text: str = "", *_: str) -> int | None:
    """Read a number as the tool prints it; None of "EOF", "N/A" and nothing."""
    return int(text, 0) if re.fullmatch(r"-?\d+|0x[0-9a-f]+", text) else None


def _components(attribute: bytes) -> Iterator[Component]:
    magic, *_ = struct.unpack_from("<I", attribute)
    if magic != COMPOSITE:
        yield from _plain(attribute, start=0, end=END_OF_FILE, instantiated=True)
        return
    num_entries = COMPOSITE_HEADER.unpack_from(attribute)[4]
    for number in range(num_entries):
        at = COMPOSITE_HEADER.size + number * ENTRY.size
        _, flags, start, end, offset, length = ENTRY.unpack_from(attribute, at)
        yield from _plain(
            attribute[offset : offset + length],
            start=start, end=end, instantiated=bool(flags & INSTANTIATED),
        )  # fmt: skip


def _plain(attribute: bytes, *, start: int, end: int, instantiated: bool) -> Iterator[Component]:
    magic, pattern, stripe_bytes, count, _ = HEADER.unpack_from(attribute)
    if magic not in (PLAIN, PLAIN_WITH_POOL, ON_THESE_OSTS):
        return
    at, pool = HEADER.size, ""
    if magic != PLAIN:
        pool = attribute[at : at + POOL_BYTES].split(b"\0")[0].decode(errors="replace")
        at += POOL_BYTES
    # A directory's layout, and a component not yet written, name no objects.
    held = instantiated and count not in EVERY_OST and len(attribute) >= at + count * OBJECT.size
    objects = range(count if held else 0)
    yield Component(
        start_bytes=start,
        end_bytes=None if end == END_OF_FILE else end,
        on_mdt=bool(pattern & ON_MDT),
        stripe_count=ALL_OSTS if count in EVERY_OST else count,
        stripe_bytes=stripe_bytes,
        osts=tuple(OBJECT.unpack_from(attribute, at + each * OBJECT.size)[0] for each in objects),
        pool=pool or None,
    )

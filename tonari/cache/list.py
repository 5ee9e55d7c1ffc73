"""`tonari cache ls|inspect`: which caches lie on this node, how whole they are, who uses them."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from dataio import SourceError, open_source
from dataio.base.filesystem import find_directory
from dataio.store.tools.report import CacheReport, survey
from tonari.errors import CommandError
from tonari.report.tables import UNKNOWN, Table
from tonari.sizes import format_bytes
from tonari.terminal import show

Directory = Annotated[str, tyro.conf.Positional]


@dataclass(frozen=True, kw_only=True)
class Ls:
    """List the caches of this node, one row each; damaged ones too.

    node0.1, node0.2, ... lie beside node0 because it was taken by a job that exchanges rows; later
    jobs use them again.
    """

    directory: Directory = "auto"
    """Cache directory; auto is where jobs on this node put theirs."""
    sources: bool = False
    """Look at every dataset too, and say which caches are of an older version of it. Takes long for
    shards without an index."""
    json: bool = False
    """Print one JSON document."""

    def run(self) -> int:
        """Run the command."""
        root = find_root(self.directory)
        reports = survey(root)
        stale = [is_stale(report) if self.sources else None for report in reports]
        if self.json:
            listed = [asdict(r) | {"stale": s} for r, s in zip(reports, stale, strict=True)]
            print(json.dumps({"caches": listed}))
            return 0
        if reports:
            rows = [cells(r, is_stale=is_old) for r, is_old in zip(reports, stale, strict=True)]
            show(Table(HEAD, rows, str(root)).text())
        else:
            print(f"{root}: no caches")
        return 0


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Say everything about one or more caches. Reads their manifests, not their rows."""

    directory: Directory = "auto"
    """A cache, or a directory of caches."""
    json: bool = False
    """Print one JSON document."""

    def run(self) -> int:
        """Run the command."""
        root = find_root(self.directory)
        reports = survey(root)
        print_details(reports, as_json=self.json)
        if not reports and not self.json:
            print(f"{root}: no caches")
        damaged = [report.problem for report in reports if report.problem is not None]
        for problem in damaged:
            sys.stderr.write(f"tonari cache: {problem}\n")
        return 1 if damaged else 0


def find_root(choice: str) -> Path:
    """Find what holds the caches.

    Raises:
        CommandError: If it was named and is not there.
    """
    root = find_directory(choice)
    if not root.is_dir() and choice != "auto":
        raise CommandError(
            f"{root}: no such directory, expected one that holds caches; check the path, or leave "
            "it out to look where jobs on this node put theirs"
        )
    return root


def is_stale(report: CacheReport) -> bool | None:
    """Whether the dataset has changed since; None where it cannot be opened any more by its name.

    Opens the source, which may count its samples.
    """
    if report.problem is not None:
        return None
    try:
        return open_source(report.source).fingerprint != report.fingerprint
    except SourceError:
        return None


HEAD = ("rows", "missing", "on disk", "last used", "used by", "cache")


def cells(report: CacheReport, *, is_stale: bool | None) -> list[str]:
    """Describe a cache in the columns of `HEAD`."""
    state = "damaged" if report.problem is not None else "stale" if is_stale else ""
    is_whole = report.problem is None
    return [
        f"{report.num_slots:,}" if is_whole else UNKNOWN,
        f"{report.num_missing:,}" if is_whole else UNKNOWN,
        format_bytes(report.disk_bytes),
        time.strftime("%Y-%m-%d %H:%M", time.localtime(report.last_used_s)),
        report.in_use_by or "nobody",
        "/".join(Path(report.directory).parts[-2:]) + (f" ({state})" if state else ""),
    ]


def print_details(
    reports: Sequence[CacheReport], *, as_json: bool, extra: dict[str, object] | None = None
) -> None:
    """Print all that is known of some caches."""
    if as_json:
        print(json.dumps({"caches": [asdict(report) for report in reports], **(extra or {})}))
        return
    if reports:
        show(Table(HEAD, [cells(report, is_stale=None) for report in reports]).text())
    for report in (report for report in reports if report.problem is None):
        show([
            report.directory,
            f"  of {report.source}",
            f"  version {report.fingerprint}, fields {', '.join(report.fields)}, epoch "
            f"{report.epoch}, user {report.owner}",
            f"  {format_bytes(report.payload_bytes)} of rows on "
            f"{format_bytes(report.disk_bytes)} of disk",
        ])  # fmt: skip

"""`tonari cache export`: a cache's rows as Parquet or Arrow files."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dataio.base.progress import ProgressBar
from dataio.store.tools.export import export_cache
from dataio.store.tools.report import CacheReport, survey
from tonari.cache.list import find_root
from tonari.errors import CommandError


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write the rows of this node's caches as Parquet or Arrow files, for other tools.

    A column sample_id, then the fields: numbers, fixed-size lists, or the bytes of images and text
    as the cache holds them. Files appear when they are whole, and none is ever replaced.
    """

    directory: Annotated[str, tyro.conf.Positional]
    """A cache, or a directory of caches; auto is where jobs on this node put theirs."""
    target: Annotated[Path, tyro.conf.Positional]
    """Directory for the files."""
    format: Literal["parquet", "arrow"] = "parquet"
    """Parquet, or Arrow IPC."""
    rows_per_file: int | None = None
    """Rows of each file; all in one file a cache, unless given."""
    json: bool = False
    """Print one JSON document."""

    def __post_init__(self) -> None:
        if self.rows_per_file is not None and self.rows_per_file < 1:
            raise ValueError(f"--rows-per-file is {self.rows_per_file}, must be >= 1")

    def run(self) -> int:
        """Run the command."""
        root = find_root(self.directory)
        reports = survey(root)
        whole = [report for report in reports if report.problem is None]
        if not whole:
            raise CommandError(f"{root}: no cache that could be read; see `tonari cache ls {root}`")
        try:
            self.target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CommandError(f"{self.target}: cannot be made ({error}); give another") from error
        written = {str(path): rows for report in whole for path, rows in self._export(report)}
        if self.json:
            print(json.dumps({"files": written}))
        else:
            for path, rows in written.items():
                print(f"{path}: {rows:,} rows")
        damaged = [report.problem for report in reports if report.problem is not None]
        for problem in damaged:
            sys.stderr.write(f"tonari cache: {problem}\n")
        return 1 if damaged else 0

    def _export(self, report: CacheReport) -> list[tuple[Path, int]]:
        bar = ProgressBar("exporting", report.num_slots - report.num_missing, shown=True)
        rows: dict[Path, int] = {}
        before = 0
        try:
            for done, path in export_cache(
                Path(report.directory),
                self.target,
                file_format=self.format,
                rows_per_file=self.rows_per_file,
            ):
                rows[path] = rows.get(path, 0) + done - before
                bar.add(done - before)
                before = done
        finally:
            bar.close()
        return list(rows.items())

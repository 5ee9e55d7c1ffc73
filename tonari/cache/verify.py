"""`tonari cache verify`: read every row; what is corrupt is read from the source again later."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from dataio import DataioError
from dataio.base.progress import ProgressBar
from dataio.store.tools.report import CacheReport, survey
from dataio.store.tools.verify import verify_cache
from tonari.cache.list import find_root


@dataclass
class _FoundDamage:
    """What was damaged in a cache."""

    corrupt: list[int] = field(default_factory=list)
    num_headers: int = 0
    arrays: list[str] = field(default_factory=list)
    rebuilt: str = ""

    @property
    def is_damaged(self) -> bool:
        return bool(self.corrupt or self.num_headers or self.arrays or self.rebuilt)


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Read every row and compare it with its checksum; exit with 1 if anything was damaged.

    Corrupt rows are marked missing, so that the next job reads just these from the source again. A
    damaged manifest is made anew of the rows that prove themselves. Caches that jobs use are left
    out, and named.
    """

    directory: Annotated[str, tyro.conf.Positional] = "auto"
    """A cache, or a directory of caches."""
    dry_run: bool = False
    """Name what is damaged, change nothing; also for caches of others, and those that jobs read."""
    json: bool = False
    """Print one JSON document."""

    def run(self) -> int:
        """Run the command."""
        found: dict[str, _FoundDamage] = {}
        problems: dict[str, str] = {}
        for report in survey(find_root(self.directory)):
            try:
                found[report.directory] = self._verified(report)
            except (DataioError, OSError) as error:
                problems[report.directory] = str(error)
        if self.json:
            document = {
                "corrupt_samples": {name: its.corrupt for name, its in found.items()},
                "damaged_headers": {name: its.num_headers for name, its in found.items()},
                "damaged_arrays": {name: its.arrays for name, its in found.items() if its.arrays},
                "rebuilt": {name: its.rebuilt for name, its in found.items() if its.rebuilt},
                "problems": problems,
            }
            print(json.dumps(document))
        for directory, its in found.items():
            self._say(directory, its)
        for problem in problems.values():
            sys.stderr.write(f"tonari cache: {problem}\n")
        return 1 if problems or any(its.is_damaged for its in found.values()) else 0

    def _verified(self, report: CacheReport) -> "_FoundDamage":
        bar = ProgressBar("verifying", report.num_slots - report.num_missing, shown=True)
        found = _FoundDamage()
        before = 0
        try:
            for part in verify_cache(Path(report.directory), dry_run=self.dry_run):
                found.corrupt += part.corrupt.tolist()
                found.num_headers += part.num_headers
                found.arrays += part.arrays
                found.rebuilt = found.rebuilt or part.rebuilt
                bar.add(part.num_rows - before)
                before = part.num_rows
        finally:
            bar.close()
        return found

    def _say(self, directory: str, found: "_FoundDamage") -> None:
        samples = found.corrupt
        if found.rebuilt:
            sys.stderr.write(f"{directory}: made the manifest anew: {found.rebuilt}\n")
        if found.arrays:
            done = "is not" if self.dry_run else "was not, and now is,"
            sys.stderr.write(
                f"{directory}: the header of {', '.join(found.arrays)} {done} what the file holds\n"
            )
        if found.num_headers:
            done = "are not" if self.dry_run else "were not, and now are,"
            sys.stderr.write(
                f"{directory}: {found.num_headers} headers of rows {done} what the manifest says\n"
            )
        if not samples:
            if not self.json and not found.is_damaged:
                print(f"{directory}: every row matches its checksum")
            return
        later = "the next job reads just these from the source again"
        cure = f"without --dry-run, {later}" if self.dry_run else later
        sys.stderr.write(
            f"{directory}: {len(samples)} rows do not match their checksums, the first is sample "
            f"{samples[0]}; {cure}\n"
        )

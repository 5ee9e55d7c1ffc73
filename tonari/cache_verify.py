"""`tonari cache verify`: read every row; what is corrupt is read from the source again later."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from dataio import DataioError
from dataio.cache_report import CacheReport, survey
from dataio.cache_verify import verify_cache
from dataio.progress import Progress
from tonari.cache_list import find_root


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Read every row and compare it with its checksum; exit with 1 if any is corrupt.

    Corrupt rows are marked missing, so that the next job reads just these from the source again.
    Caches that jobs use are left out, and named.
    """

    directory: Annotated[str, tyro.conf.Positional] = "auto"
    """A cache, or a directory of caches."""
    dry_run: bool = False
    """Name corrupt rows, change nothing; also for caches of others, and those that jobs read."""
    json: bool = False
    """Print one JSON document."""

    def run(self) -> int:
        """Run the command."""
        corrupt: dict[str, list[int]] = {}
        problems: dict[str, str] = {}
        for report in survey(find_root(self.directory)):
            try:
                corrupt[report.directory] = self._verified(report)
            except (DataioError, OSError) as error:
                problems[report.directory] = str(error)
        if self.json:
            print(json.dumps({"corrupt_samples": corrupt, "problems": problems}))
        for directory, samples in corrupt.items():
            self._say(directory, samples)
        for problem in problems.values():
            sys.stderr.write(f"tonari cache: {problem}\n")
        return 1 if problems or any(corrupt.values()) else 0

    def _verified(self, report: CacheReport) -> list[int]:
        bar = Progress("verifying", report.num_slots - report.num_missing, shown=True)
        corrupt: list[int] = []
        before = 0
        try:
            for done, samples in verify_cache(Path(report.directory), dry_run=self.dry_run):
                corrupt += samples.tolist()
                bar.add(done - before)
                before = done
        finally:
            bar.close()
        return corrupt

    def _say(self, directory: str, samples: list[int]) -> None:
        if not samples:
            if not self.json:
                print(f"{directory}: every row matches its checksum")
            return
        later = "the next job reads just these from the source again"
        cure = f"without --dry-run, {later}" if self.dry_run else later
        sys.stderr.write(
            f"{directory}: {len(samples)} rows do not match their checksums, the first is sample "
            f"{samples[0]}; {cure}\n"
        )

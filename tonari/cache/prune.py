"""`tonari cache prune`: remove caches that no job uses."""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from dataio import CacheError
from dataio.base.progress import ProgressBar
from dataio.store.tools.prune import PruneChoice, remove_cache
from dataio.store.tools.report import survey
from tonari.cache.list import find_root, is_stale
from tonari.sizes import format_bytes, parse_bytes, parse_duration_s


@dataclass(frozen=True, kw_only=True)
class Prune:
    """Remove caches that no job uses, and what killed jobs left of theirs.

    Say which: --all, --stale, --older-than, --keep-bytes; each adds to the others. Only files that
    a cache wrote are removed, and links never followed; a directory that holds anything else stays
    as it is and is named. Jobs stage again what they need.
    """

    directory: Annotated[str, tyro.conf.Positional] = "auto"
    """A cache, or a directory of caches."""
    all: bool = False
    """All caches."""
    stale: bool = False
    """Those whose dataset has changed since, and those too damaged to be used."""
    older_than: str | None = None
    """Those that no job has taken for so long, such as 7d or 12h."""
    keep_bytes: str | None = None
    """The least recently used, until the others take at most this, such as 100GB."""
    dry_run: bool = False
    """Say what would go, remove nothing."""
    json: bool = False
    """Print one JSON document."""

    def __post_init__(self) -> None:
        if not (self.all or self.stale or self.older_than or self.keep_bytes):
            raise ValueError(
                "nothing was chosen; give --all, --stale, --older-than 7d or --keep-bytes 100GB"
            )
        self._choice()

    def _choice(self) -> PruneChoice:
        return PruneChoice(
            everything=self.all,
            stale=self.stale,
            unused_s=parse_duration_s(self.older_than) if self.older_than else None,
            keep_bytes=parse_bytes(self.keep_bytes) if self.keep_bytes else None,
        )

    def run(self) -> int:
        """Run the command."""
        reports = survey(find_root(self.directory))
        stale = [is_stale(report) if self.stale else False for report in reports]
        changed = [each is True for each in stale]
        going = self._choice().of(reports, changed, now_s=time.time())
        unknown = [
            report for report, each in zip(reports, stale, strict=True)
            if each is None and report.problem is None and report not in going
        ]  # fmt: skip
        freed: dict[str, int] = {}
        problems: dict[str, str] = {}
        bar = ProgressBar("removing caches", len(going), shown=not self.dry_run)
        for report in going:
            try:
                freed[report.directory] = (
                    report.disk_bytes if self.dry_run else remove_cache(Path(report.directory))
                )
            except (CacheError, OSError) as error:
                problems[report.directory] = str(error)
            bar.add(1)
        bar.close()
        self._say(freed, problems)
        for report in unknown:
            sys.stderr.write(
                f"tonari cache: left {report.directory}: whether it is stale is not known, as "
                f"{report.source} does not open by its name alone; if it is, remove the directory\n"
            )
        return 1 if problems else 0

    def _say(self, freed: dict[str, int], problems: dict[str, str]) -> None:
        if self.json:
            told = {"removed": freed, "problems": problems, "dry_run": self.dry_run}
            print(json.dumps(told))
        else:
            word = "would remove" if self.dry_run else "removed"
            for directory, num_bytes in freed.items():
                print(f"{word} {directory}, {format_bytes(num_bytes)}")
            print(f"{word} {len(freed)} caches, {format_bytes(sum(freed.values()))} in all")
        for problem in problems.values():
            sys.stderr.write(f"tonari cache: {problem}\n")

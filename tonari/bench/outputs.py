"""Where a benchmark's results go, as flags of its command, and how repeats are summed up."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tonari.outputs import check_output, check_plot

Json = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class DocumentOutputs:
    """Where the document goes."""

    json: bool = False
    """Print one JSON document, nothing else on stdout."""
    json_file: Path | None = None
    """Write that document here."""

    def check(self) -> None:
        """Refuse what could not be written when all is measured."""
        check_output("--json-file", self.json_file)

    def write(self, document: Mapping[str, object], words: Callable[[], str]) -> None:
        """Write the document where it was asked for, and print it, or the words."""
        if self.json_file is not None:
            self.json_file.write_text(json.dumps(document, indent=1) + "\n")
        print(json.dumps(document) if self.json else words())


@dataclass(frozen=True, kw_only=True)
class ResultOutputs(DocumentOutputs):
    """Where the document, a spreadsheet and a picture go."""

    csv: Path | None = None
    """Write a line a record here."""
    plot: Path | None = None
    """Draw it here: a .png, .svg or .pdf. Needs matplotlib (`report` extra)."""

    def check(self) -> None:
        super().check()
        check_output("--csv", self.csv)
        check_plot("--plot", self.plot)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Find the median, p10 and p90 of a figure's repeats, at least one."""
    low, middle, high = np.percentile(values, [10, 50, 90]).tolist()
    return {"median": middle, "p10": low, "p90": high}

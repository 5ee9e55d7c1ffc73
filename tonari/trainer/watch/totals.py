"""What one start of a run read, hid and saved, over all its ranks and epochs."""

from collections.abc import Mapping

import numpy as np

from dataio.base.sizes import format_bytes
from dataio.batch.figures import CAUSES
from dataio.world import World
from tonari.trainer.mesh.place import Place

SUMMED = (
    "source_bytes", "staging_bytes", "staged_rows", "rows", "disk_bytes", "page_cache_bytes"
)  # fmt: skip
BY_CAUSE = {f"wait_{cause}_s": cause for cause in CAUSES}
SLOWEST = (
    "wait_s", "wait_p95_s", *BY_CAUSE, "window_wait_s", "staging_s", "exchange_blocked_s"
)  # fmt: skip
FIGURES = (*SUMMED, *SLOWEST)
AS_MUCH = 0.95
"""Of a DataLoader's bytes: who reads more has saved nothing worth a word."""


class Totals:
    """Counts parts of epochs as they are trained.

    Attributes:
        num_saved: Checkpoints that were written.
    """

    def __init__(self) -> None:
        self._epochs = self._hidden = 0.0
        self.num_saved = 0

    def add(self, epochs: float, stats: Mapping[str, float]) -> None:
        """Count a part of an epoch.

        Args:
            epochs: The part, in [0, 1].
            stats: Of the loader, while the epoch runs.
        """
        self._epochs += epochs
        self._hidden += epochs * stats.get("hidden_fraction", 0.0)

    def sum_up(
        self, stats: Mapping[str, float], *, num_samples: int, place: Place, world: World
    ) -> dict[str, float]:
        """Sum up over all ranks. Collective.

        Args:
            stats: Of the loader, at the end.
            num_samples: Of the dataset; 0 where nothing is read.
            place: Of this rank.
            world: All ranks.
        """
        reads = float(place.reads)
        # A scorer's loader reads targets of the same rows: they are counted once.
        times = {name: 1.0 if name in ("source_bytes", *SLOWEST) else reads for name in FIGURES}
        figures = [stats.get(name, 0.0) * times[name] for name in FIGURES]
        row = np.array([reads, reads * self._hidden, num_samples, *figures])
        ranks = world.allgather_array(row, doing="adding up the run's figures")
        readers, hidden = ranks[:, :2].sum(axis=0).tolist()
        sums, slowest = ranks[:, 3 : 3 + len(SUMMED)].sum(axis=0), ranks[:, -len(SLOWEST) :]
        return {
            "epochs": self._epochs, "num_samples": float(ranks[:, 2].max()),
            "hidden_fraction": hidden / readers / self._epochs if self._epochs else 0.0,
            **dict(zip(SUMMED, sums.tolist(), strict=True)),
            **dict(zip(SLOWEST, slowest.max(axis=0).tolist(), strict=True)),
            "num_saved": float(self.num_saved),
        }  # fmt: skip


def source_words(totals: Mapping[str, float]) -> str:
    """Say what was read from the source, and what a DataLoader would have read.

    It reads each sample once an epoch: samples x epochs x the bytes that staging read for a row;
    where all were in the cache already, x the bytes of a row there.
    """
    read, rows = totals["source_bytes"], totals["staged_rows"]
    words = f"read {format_bytes(round(read))} from the source"
    if rows:
        row_bytes, of = totals["staging_bytes"] / rows, ""
    elif rows := totals["rows"]:
        row_bytes = (totals["disk_bytes"] + totals["page_cache_bytes"]) / rows
        of = ", if samples are as large there as in the cache"
    else:
        return words
    whole = row_bytes * totals["num_samples"] * totals["epochs"]
    would = (
        f"{words}; a DataLoader would have read about {format_bytes(round(whole))}, each of "
        f"{totals['num_samples']:,.0f} samples once an epoch{of}"
    )
    if read < AS_MUCH * whole:
        return would
    why = "; staging pays from the second epoch on" if totals["epochs"] <= 1 else ""
    return f"{would}: nothing was saved{why}"


CURES = {
    "source": "stage all rows before training, give the cache more room, or look at the source",
    "disk": "put the cache on a faster disk, or give the node's ranks fewer bytes than its memory",
    "decode": 'give it more threads ([data.workers] threads), or set data.decoded = "auto"',
    "copy": "put the cache on a faster disk or in memory, or keep fewer bytes of a row",
    "transform": "give it more threads ([data.workers] threads), or make the transform cheaper",
    "processes": "give it more processes, or make the transform cheaper",
    "feeder": "give it more cores that feed, or more threads ([data.workers] threads)",
}
NOTABLE, NOTABLE_S = 0.05, 10.0
"""Of the time of steps, and in seconds: shorter waits are not worth a change."""


def wait_words(totals: Mapping[str, float], parts_s: Mapping[str, float]) -> str:
    """Say for what steps waited, and what to change; empty where they hardly did.

    Args:
        totals: As for `time_words`.
        parts_s: As for `time_words`.
    """
    wait_s = totals["wait_s"]
    if wait_s <= max(NOTABLE * parts_s["train_s"], NOTABLE_S):
        return ""
    found = sorted(((totals[name], cause) for name, cause in BY_CAUSE.items()), reverse=True)
    parts = ", ".join(
        f"{cause} {part_s:.1f} s" for part_s, cause in found if part_s > 0.01 * wait_s
    )
    share = wait_s / parts_s["train_s"]
    return (
        f"\nsteps waited for batches {share:.0%} of their time ({parts}; 19 of 20 waits were "
        f"shorter than {totals['wait_p95_s']:.2g} s): {CURES[found[0][1]]}"
    )


def time_words(totals: Mapping[str, float], parts_s: Mapping[str, float]) -> str:
    """Say where the time went.

    Args:
        totals: Of all ranks; a wait is that of the rank that waited longest.
        parts_s: Seconds of this rank by part of an epoch, over all epochs.
    """
    window_s, saved = totals["window_wait_s"], totals["num_saved"]
    quota = f", {window_s:.1f} s of it for rows beyond the quota" if window_s else ""
    rescored = f"new scores of hidden rows {parts_s['refresh_s']:.1f} s, "
    return (
        f"time: staging {totals['staging_s']:.1f} s, "
        f"steps {parts_s['train_s']:.1f} s (waiting for batches {totals['wait_s']:.1f} s{quota}), "
        f"epoch ends {parts_s['epoch_end_s']:.1f} s (waiting for the exchange "
        f"{totals['exchange_blocked_s']:.1f} s), "
        f"{rescored if totals['hidden_fraction'] else ''}"
        f"evaluation {parts_s['evaluation_s']:.1f} s, "
        f"checkpoints {parts_s['checkpoint_s']:.1f} s ({saved:.0f} written)"
    )

"""What an epoch cost and gave: measured on each replica, combined over all of them."""

import hashlib
import time
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from dataio.batch.figures import CAUSES
from dataio.world import World
from tonari.trainer.mesh.place import Place

SUMMED = ("exchanged_rows", "source_bytes")
BY_CAUSE = tuple(f"wait_{cause}_s" for cause in CAUSES)
SLOWEST = ("wait_s", "staging_s", "exchange_blocked_s", *BY_CAUSE)
SHARED = ("hidden_fraction", "exchange_overlap_fraction")
"""Figures that are means over the replicas."""

STEPS_AT_ONCE = 16
"""Batches that are counted together: between two steps all code is cold, so calls of torch cost."""

Figures = dict[str, float | None]


class Meter:
    """Sums an epoch's losses and samples, and notes what the loader's figures were at its start.

    Of an epoch that was interrupted and resumed, it sees what this start of the run trained, and is
    given the rest by `go_on`. A replica's losses and figures are on its reader, its sample ids on
    its scorer.

    Args:
        before: The loader's ``stats`` where the epoch begins; empty for a loader just made, so that
            its staging counts.
        place: This rank's.
    """

    def __init__(self, before: Mapping[str, float], place: Place) -> None:
        self._before, self._place = before, place
        self._started = self._asked_at = time.perf_counter()
        # Of batches not counted yet; they are counted where they are, so that no step waits.
        self._valid: list[Tensor] = []
        self._new_samples: Tensor | int = 0
        self._new_rows = 0
        # Losses and their rows, padding included, samples: of the epoch, and since the last call of
        # recent, added up apart: differences of the epoch's sums would depend on where they began.
        # By rows: on other replicas a batch may have another number of them.
        self._sums, self._recent = np.zeros(3), np.zeros(3)
        self._earlier: Mapping[str, float] = {}
        self._waited_s = before.get("wait_s", 0.0)

    def go_on(self, so_far: Mapping[str, float]) -> None:
        """Count in what an earlier start trained of the epoch; nothing, if that is not known."""
        self._earlier = so_far

    def add(self, batch: Mapping[str, Tensor]) -> None:
        """Count a batch."""
        if self._place.reads:
            self._new_rows += next(iter(batch.values())).shape[0]
        if self._place.rank == self._place.scorer:
            self._valid.append(batch["sample_id"] >= 0)
            if len(self._valid) >= STEPS_AT_ONCE:
                self._count_samples()

    def recent(self, mean_loss: float, after: Mapping[str, float], world: World) -> Figures:
        """Combine what was since the last call, over all replicas. Collective.

        Args:
            mean_loss: Of this replica's batches since the last call of any method that takes it,
                weighted; any where nothing is read.
            after: The loader's ``stats`` now.
            world: All ranks.
        """
        self._take(mean_loss)
        now, waited_s = time.perf_counter(), after.get("wait_s", 0.0)
        recent_s = now - self._asked_at
        shared = [after.get(name, 0.0) for name in SHARED]
        mine = np.array([*self._recent, waited_s - self._waited_s, *shared, self._place.reads])
        self._recent, self._asked_at, self._waited_s = np.zeros(3), now, waited_s
        doing = "adding up the recent steps' figures"
        *sums, num_replicas = world.allreduce(mine, op="sum", doing=doing).tolist()
        loss, rows, samples, wait_s = sums[:4]
        return {
            "loss": loss / rows if rows else None,
            "samples_per_s": samples / recent_s,
            "wait_fraction": min(wait_s / num_replicas / recent_s, 1.0),
            **{name: sums[4 + n] / num_replicas for n, name in enumerate(SHARED)},
        }

    def epoch_line(self, mean_loss: float, after: Mapping[str, float], world: World) -> Figures:
        """Combine the epoch's figures over all replicas. Collective.

        Args:
            mean_loss: Of this replica's batches since the last call of any method that takes it.
            after: The loader's ``stats`` now.
            world: All ranks.
        """
        so_far = self.so_far(mean_loss, after, world)
        samples, epoch_s = so_far["samples"], so_far["epoch_s"]
        loss, rows = so_far["loss_sum"], so_far["rows"]
        counted = {name: int(so_far[name]) for name in SUMMED}
        named = {name: so_far[name] for name in ("epoch_s", *SLOWEST, *SHARED)}
        return {
            "loss": loss / rows if rows else None,
            "train_samples_per_s": samples / epoch_s,
            **named,
            **counted,
        }

    def so_far(
        self, mean_loss: float, after: Mapping[str, float], world: World
    ) -> dict[str, float]:
        """Sum up the epoch over all replicas, for a start that is to `go_on`. Collective.

        Args:
            mean_loss: Of this replica's batches since the last call of any method that takes it.
            after: The loader's ``stats`` now.
            world: All ranks.
        """
        self._take(mean_loss)
        epoch_s = time.perf_counter() - self._started
        names = (*SLOWEST, *SUMMED)
        figures = [after.get(name, 0.0) - self._before.get(name, 0.0) for name in names]
        shared = [after.get(name, 0.0) for name in SHARED]
        row = np.array([*self._sums, self._place.reads, epoch_s, *figures, *shared])
        # float64[world_size, figures]
        gathered = world.allgather_array(row, doing="adding up the epoch's figures")
        *sums, num_replicas = gathered[:, :4].sum(axis=0).tolist()
        summed = ("loss_sum", "rows", "samples", "epoch_s", *SLOWEST, *SUMMED)
        first = 5 + len(SLOWEST)
        slowest_s, counts = gathered[:, 4:first].max(axis=0), gathered[:, first:].sum(axis=0)
        mine = [*sums, *slowest_s.tolist(), *counts[:2].tolist()]
        earlier = self._earlier
        return {
            **{name: of + earlier.get(name, 0.0) for name, of in zip(summed, mine, strict=True)},
            "hidden_fraction": counts[2] / num_replicas,
            # Of the exchange before the epoch, which its first start has completed.
            "exchange_overlap_fraction": earlier.get(
                "exchange_overlap_fraction", counts[3] / num_replicas
            ),
        }

    def _count_samples(self) -> None:
        if self._valid:
            self._new_samples = self._new_samples + torch.cat(self._valid).sum()
            self._valid.clear()

    def _take(self, mean_loss: float) -> None:
        self._count_samples()
        rows = self._new_rows
        new = (mean_loss * rows if rows else 0.0, rows, int(self._new_samples))
        self._sums += new
        self._recent += new
        self._new_rows = self._new_samples = 0


def combine_order_hashes(digest: str, world: World, place: Place) -> str:
    """Hash the order of all replicas from each reader's hash, in replica order. Collective."""
    by_rank = world.allgather(digest.encode(), doing="comparing orders")
    in_order = [by_rank[reader] for reader in place.readers]
    return hashlib.blake2b(b" ".join(in_order), digest_size=8).hexdigest()

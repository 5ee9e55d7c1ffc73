"""What an epoch cost and gave: measured on each replica, combined over all of them."""

import hashlib
import time
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataio.world import World

SUMMED = ("exchanged_rows", "source_bytes")
SLOWEST = ("wait_s", "staging_s")


class Meter:
    """Sums an epoch's losses and samples, and notes what the loader's figures were at its start.

    Of an epoch that was interrupted and resumed, it sees what this start of the run trained.

    Args:
        before: The loader's ``stats`` where the epoch begins; empty for a loader just made, so that
            its staging counts.
        device: Where losses are summed, so that no step waits for them.
    """

    def __init__(self, before: Mapping[str, float], device: torch.device) -> None:
        self._before = before
        self._started = time.perf_counter()
        # Losses, steps, samples: of the epoch, and at the last call of recent_loss.
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)
        self._told = self._sums.clone()

    def add(self, loss: Tensor, batch: Mapping[str, Tensor]) -> None:
        """Count a step."""
        num_samples = (batch["sample_id"] >= 0).sum().to(loss.device)
        self._sums += torch.stack([loss, torch.ones_like(loss), num_samples])

    def recent_loss(self, world: World) -> float:
        """Compute the mean loss since the last call, over all replicas. Collective."""
        recent = _array(self._sums - self._told)
        self._told = self._sums.clone()
        total = world.allreduce(recent, op="sum", doing="adding up losses")
        return float(total[0] / total[1])

    def epoch_line(self, after: Mapping[str, float], world: World) -> dict[str, float | None]:
        """Combine the epoch's figures over all replicas. Collective.

        Args:
            after: The loader's ``stats`` now.
            world: All replicas.
        """
        epoch_s = time.perf_counter() - self._started
        figures = [after[name] - self._before.get(name, 0) for name in (*SLOWEST, *SUMMED)]
        mine = np.array([*_array(self._sums), epoch_s, after["hidden_fraction"], *figures])
        # float64[world_size, figures]
        told = world.allgather_array(mine, doing="adding up the epoch's figures")
        loss, steps, samples = told[:, :3].sum(axis=0).tolist()
        slowest_s = told[:, [3, 5, 6]].max(axis=0).tolist()
        return {
            "loss": loss / steps if steps else None,
            "epoch_s": slowest_s[0],
            **dict(zip(SLOWEST, slowest_s[1:], strict=True)),
            "train_samples_per_s": samples / slowest_s[0],
            "hidden_fraction": float(told[:, 4].mean()),
            **dict(zip(SUMMED, told[:, 7:].sum(axis=0).astype(int).tolist(), strict=True)),
        }


def combine_order_hashes(digest: str, world: World) -> str:
    """Hash the order of all replicas from each one's hash, in replica order. Collective."""
    by_rank = world.allgather(digest.encode(), doing="comparing orders")
    in_order = [by_rank[world.rank_of_replica(replica)] for replica in range(world.num_replicas)]
    return hashlib.blake2b(b" ".join(in_order), digest_size=8).hexdigest()


def _array(values: Tensor) -> NDArray[np.float64]:
    return np.asarray(values.cpu().numpy(), np.float64)

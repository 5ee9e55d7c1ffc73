"""One batch of a run again, in one process, read from the source: bytes, crops and transforms."""

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch

from dataio.batch.gather import Gather
from dataio.batch.values import Batch, BatchTransform, Collate, Transform
from dataio.opening import Openable, Opener
from dataio.plan.order import PADDING, Block
from dataio.plan.placement import Placement
from dataio.pool.pool import Pool
from dataio.rowlog.answers import BatchRows
from dataio.rows.fields import Field
from dataio.source.base import place_of
from dataio.source.wrap.transformed import StageTransform
from dataio.world import single_world


def replay_batch(
    rows: BatchRows,
    source: Openable,
    *,
    fields: Mapping[str, Field],
    seed: int,
    transform: Transform | None = None,
    batch_transform: BatchTransform | None = None,
    collate: Collate | None = None,
    stage_transform: StageTransform | None = None,
) -> Batch:
    """Make a batch as it was delivered, on the host.

    What a transform draws is a function of (seed, epoch, sample), and of a batch of (seed, epoch,
    replica, step), so it is drawn again. What it draws elsewhere, such as from a generator of its
    own, is not. The batch's rows alone are read, into a temporary directory.

    Args:
        rows: Which.
        source: As the loader was given it.
        fields: Likewise, and so on.
        seed: Likewise.
        transform: Likewise.
        batch_transform: Likewise.
        collate: Likewise.
        stage_transform: That of `Staging`.

    Raises:
        DataioError: If the source cannot be read.
    """
    ids, where = np.unique(rows.sample_id, return_inverse=True)
    with tempfile.TemporaryDirectory(prefix="tonari-replay-") as name, single_world() as world:
        opened, stored = Opener(Path(name), dict(fields), stage_transform, world).open(source)
        wanted = Placement("a batch", 0, len(ids), lambda: ids)
        pool = Pool(
            opened, stored, world=world, root=Path(name), num_slots=len(ids), num_leaving=0,
            progress=False, wanted=wanted,
        )  # fmt: skip
        try:
            pool.ensure(wanted)
            gather = Gather(
                pool.cache, stored, num_threads=0, transform=transform,
                batch_transform=batch_transform, collate=collate, seed=seed, replica=rows.replica,
                place_of=partial(place_of, opened),
            )  # fmt: skip
            try:
                slots = where.reshape(1, -1)
                block = Block(slots, rows.block.num_valid, rows.block.weight, rows.block.repeat)
                made = gather.batches(
                    lambda *_: block, range(rows.step, rows.step + 1), epoch=rows.epoch
                )
                (batch,) = made
            finally:
                gather.close()
        finally:
            pool.close()
    if isinstance(batch, dict) and "slot" in batch:
        slot = torch.from_numpy(rows.block.slots[0].copy())
        batch["slot"] = torch.where(batch["slot"] == PADDING, PADDING, slot)
    return batch

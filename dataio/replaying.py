"""One batch of a run again, in one process, read from the source: bytes, crops and transforms."""

import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dataio.arguments import Arguments
from dataio.documents import mask_documents
from dataio.opening import Opener
from dataio.options import NodeCache, Reports, Staging, Workers
from dataio.plan.order import PADDING, StepsBlock
from dataio.plan.placement import Placement
from dataio.rowlog.answers import BatchRows
from dataio.rows.samples import Batch
from dataio.session import Session
from dataio.store.open import NodeRows
from dataio.store.share import Share
from dataio.world import single_world


def replay_batch(rows: BatchRows, arguments: Arguments) -> Batch:
    """Make a batch as it was delivered, on the host.

    What a transform draws is a function of (seed, epoch, sample), and of a batch of (seed, epoch,
    replica, step), so it is drawn again. What it draws elsewhere, such as from a generator of its
    own, is not. The batch's rows alone are read, into a temporary directory.

    Args:
        rows: Which.
        arguments: Those of the loader: its source, fields, seed and transforms.

    Raises:
        DataioError: If the source cannot be read.
    """
    ids, where = np.unique(rows.sample_id, return_inverse=True)
    with tempfile.TemporaryDirectory(prefix="tonari-replay-") as name, single_world() as world:
        opener = Opener(Path(name), arguments.fields, arguments.staging.transform, world)
        opened, stored = opener.open(arguments.source)
        share = Share(len(ids), Placement("a batch", 0, len(ids), lambda: ids))
        mask = mask_documents(
            arguments.batch_transform, arguments.fields, opened, rows.exclusion, world
        )
        alone = replace(
            arguments, batch_transform=mask, cache=NodeCache(name), importance=None,
            on_error="raise", staging=Staging(), workers=Workers(threads=0),
            reports=Reports(progress=False),
        )  # fmt: skip
        its_rows = NodeRows(opened, stored, share, alone, world, Path(name))
        session = Session(its_rows, replica=rows.replica)
        with contextlib.closing(session):
            assert share.wanted is not None
            session.pool.ensure(share.wanted)
            slots = where.reshape(1, -1)
            block = StepsBlock(slots, rows.block.num_valid, rows.block.weight, rows.block.repeat)
            (batch,) = session.gather.batches(
                lambda *_: block, range(rows.step, rows.step + 1), epoch=rows.epoch
            )
    if isinstance(batch, dict) and "slot" in batch:
        slot = torch.from_numpy(rows.block.slots[0].copy())
        batch["slot"] = torch.where(batch["slot"] == PADDING, PADDING, slot)
    return batch

"""What measured loaders share: each rank gets its part of one shuffle."""

import numpy as np

from tonari.bench.loader.peers.harness import PeerTask


def test_ranks_together_get_every_sample_once_in_another_order_each_epoch():
    orders = []
    for epoch in (0, 1):
        batches = [
            batch
            for rank in range(3)
            for batch in PeerTask(
                source="", prepared="", batch_size=4, world_size=3, rank=rank
            ).batches_of_ids(epoch, 32)
        ]
        assert max(map(len, batches)) == 4
        orders.append(np.concatenate(batches))
        assert sorted(orders[-1].tolist()) == list(range(32))
    assert (orders[0] != orders[1]).any()

"""The order and exchange of a seed never change unnoticed: a change alters users' runs.

After one that is meant: raise ``ORDER_VERSION``, say so in the changelog under "Sample order", and
run ``python -m tests.shuffle.test_golden`` to write the file anew.
"""

import hashlib
import json
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np

from dataio.base.seeding import ORDER_VERSION
from dataio.plan.layout import Layout
from dataio.plan.policies import Shuffle
from shuffle import Global, Local, Partial
from shuffle.plan import leaving_slots, num_chunks, num_leaving, placement
from shuffle.ring import partners
from tests.resumes import ResumedRun, RunJob, in_memory

GOLDEN = Path(__file__).parent.parent / "golden" / "plan.json"
WORLDS = {"1": (1,), "3": (2, 1), "4": (2, 2)}

POLICIES: tuple[Shuffle, ...] = (Local(), Partial(0.3), Global(), Global(moves=True))

Plan = dict[str, list[list[list[int]]]]


def small_plan(layout: Layout) -> Plan:
    """Who sends what to whom in epochs 0 and 1, and what each pool holds at the start of 0 to 2."""
    leaving = num_leaving(layout, 0.5)
    replicas, nodes = range(layout.num_replicas), range(layout.num_nodes)
    return {
        "leaving_slots": [
            [
                leaving_slots(layout, replica=r, num_leaving=leaving, seed=0, epoch=e).tolist()
                for r in replicas
            ]
            for e in range(2)
        ],
        "destinations": [
            [
                [partners(layout, seed=0, epoch=e, chunk=c, replica=r)[0] for r in replicas]
                for c in range(num_chunks(leaving))
            ]
            for e in range(2)
        ],
        "placement": [
            [placement(layout, node=n, exchange=0.5, seed=0, epoch=e).tolist() for n in nodes]
            for e in range(3)
        ],
    }


def big_plan(layout: Layout) -> str:
    """sha256 of all pools, side by side, after 5 epochs."""
    pools = [
        placement(layout, node=node, exchange=0.25, seed=1, epoch=5)
        for node in range(layout.num_nodes)
    ]
    return hashlib.sha256(np.concatenate(pools).astype("<i8").tobytes()).hexdigest()


def orders(replicas: Sequence[int], policy: Shuffle) -> list[str]:
    """sha256 of the samples that all ranks train in an epoch, rank after rank, of 3 epochs."""
    with tempfile.TemporaryDirectory() as place:
        run = ResumedRun(Path(place), in_memory(61, 3), {"shuffle": policy}, 3)
        ranks = run.start(RunJob(replicas)).batches
    trained = [
        [[row[0] for row in batch.rows] for seen in ranks for batch in seen if batch.epoch == epoch]
        for epoch in range(3)
    ]
    return [hashlib.sha256(json.dumps(ids).encode()).hexdigest() for ids in trained]


def plans() -> dict[str, object]:
    return {
        "order_version": ORDER_VERSION,
        "orders": {
            f"{world} {policy}": orders(replicas, policy)
            for (world, replicas), policy in product(WORLDS.items(), POLICIES)
        },
        "worlds": {
            world: {
                "small": small_plan(Layout(replicas, 18)),
                "big_sha256": big_plan(Layout(replicas, 100_003)),
            }
            for world, replicas in WORLDS.items()
        },
    }


def test_plans_are_those_of_this_order_version() -> None:
    assert plans() == json.loads(GOLDEN.read_text())


def test_each_epoch_has_an_order_of_its_own() -> None:
    for run, hashes in json.loads(GOLDEN.read_text())["orders"].items():
        assert len(set(hashes)) == 3, run


def test_plans_of_several_nodes_move_rows() -> None:
    worlds = json.loads(GOLDEN.read_text())["worlds"]
    for world in ("3", "4"):
        first, *_, last = worlds[world]["small"]["placement"]
        assert first != last
    assert len({world["big_sha256"] for world in worlds.values()}) == len(WORLDS)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(plans(), indent=1) + "\n")

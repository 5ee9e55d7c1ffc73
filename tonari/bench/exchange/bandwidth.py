"""How near does an exchange come to the bare steps it is made of?

Two MPI ranks stand for two nodes; each sends the rows of random slots to the other and writes what
comes. Interleaved in each repeat, the same bytes in parcels of the same size:

- ``thread``, ``polling``: `Transfer` from one cache to the next, by its two drivers, nothing else
  running;
- ``ring``: the world's own non-blocking sends and receives, of buffers that are ready;
- ``steps``: gather from a mapped array, the ring, write to a file, one after the other;
- ``there``: the same, but each row is written where the exchange writes it, through a mapped file:
  what scattered positions cost in any case.

Warm. No way waits for a flush: a thread of the cache begins it while rows still arrive, and only
the epoch end waits for it. All is flushed before the next way is measured, which would be slowed
otherwise. ``fresh`` positions lie side by side, as in the first exchange of a cache; ``scattered``
ones are those that rows of earlier exchanges have left.

    TONARI_RANKS_PER_NODE=1 mpiexec -n 2 python -m tonari.bench.exchange.bandwidth --json
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataio import Array, Bytes, Field, Int, Reports
from dataio.arguments import Arguments
from dataio.exchange.carrier import SEGMENT_BYTES, SEGMENTS_OUT
from dataio.exchange.transfer import Transfer
from dataio.plan.layout import Layout
from dataio.plan.placement import Placement
from dataio.rows.parcel import Parcel, ParcelBuffers
from dataio.store.epoch_end import commit_arrivals
from dataio.store.open import NodeRows
from dataio.store.pool import Pool
from dataio.store.share import Share
from dataio.world import CHANNEL_TAGS, Request, World, discover_world
from tonari.bench.generated import Generated
from tonari.bench.outputs import spread
from tonari.report.machine import describe_machine

PARCEL_BYTES = 64 << 20
SETS: dict[str, tuple[int, Field]] = {
    "3KiB": (3 << 10, Array("x", (32, 32, 3), "uint8")),
    "100KiB": (100 << 10, Array("x", (100 << 10,), "uint8")),
    "bytes3KiB": (3 << 10, Bytes("x")),
    "bytes100KiB": (100 << 10, Bytes("x")),
}
WAYS = ("thread", "polling", "ring", "steps", "there")


class Bare:
    """The same bytes without any of ours: one mapped array, reused buffers, one file."""

    def __init__(self, world: World, directory: Path, row_bytes: int, num_leaving: int) -> None:
        path = directory / f"bare-{world.rank}"
        self._rows = np.memmap(path, np.uint8, "w+", shape=(2 * num_leaving, row_bytes))
        self._rows[:] = np.random.default_rng(0).integers(0, 256, row_bytes, np.uint8)
        rows = self._rows.view(np.ndarray)
        self._mapped, self._world = rows, world
        self._slots = cut(num_leaving, row_bytes, seed=2)
        self._sent = [np.empty((len(part), row_bytes), np.uint8) for part in self._slots]
        self._come = [np.zeros((len(part), row_bytes), np.uint8) for part in self._slots]
        self._target = os.open(directory / f"target-{world.rank}", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(self._target, 0, num_leaving * row_bytes)
        # As many positions as the cache has: its rows, and room for twice what leaves.
        shape = (4 * num_leaving, row_bytes)
        self._room = np.memmap(directory / f"room-{world.rank}", np.uint8, "w+", shape=shape)
        self._room[:] = 0

    def ring(self) -> None:
        """Exchange all buffers, in messages as long and as many at a time as an exchange does."""
        world, peer = self._world, 1 - self._world.rank
        sent, come = _segments(self._sent), _segments(self._come)
        under_way: deque[list[Request]] = deque()
        for number, (data, into) in enumerate(zip(sent, come, strict=True)):
            tag = number % CHANNEL_TAGS
            under_way.append(
                [world.irecv(into, source=peer, tag=tag), world.isend(data, dest=peer, tag=tag)]
            )
            if len(under_way) == SEGMENTS_OUT:
                world.wait(under_way.popleft(), peers=[peer] * 2, doing="ring")
        for pair in under_way:
            world.wait(pair, peers=[peer] * 2, doing="ring")

    def steps(self) -> None:
        """Gather, ring, write."""
        self._gather()
        self.ring()
        offset = 0
        for data in self._come:
            left = data.reshape(-1).data
            while len(left):
                written = os.pwrite(self._target, left, offset)
                left, offset = left[written:], offset + written

    def steps_there(self, positions: NDArray[np.int64]) -> None:
        """Gather, ring, write each row to its position."""
        self._gather()
        self.ring()
        first = 0
        for data in self._come:
            self._room[positions[first : first + len(data)]] = data
            first += len(data)

    def _gather(self) -> None:
        for slots, data in zip(self._slots, self._sent, strict=True):
            np.take(self._mapped, slots, axis=0, out=data, mode="clip")

    def flush(self) -> None:
        """Wait until the disk has what was written."""
        os.fdatasync(self._target)
        self._room.flush()

    def close(self) -> None:
        """Close the file."""
        os.close(self._target)


def _segments(parcels: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
    return [
        data.reshape(-1)[first : first + SEGMENT_BYTES]
        for data in parcels
        for first in range(0, data.nbytes, SEGMENT_BYTES)
    ]


def cut(num_leaving: int, row_bytes: int, *, seed: int) -> list[NDArray[np.int64]]:
    """Choose half of the slots, in parcels of equal size."""
    slots = np.random.default_rng(seed).permutation(2 * num_leaving)[:num_leaving]
    return np.array_split(slots, -(-num_leaving * row_bytes // PARCEL_BYTES))


class Ours:
    """A pool of generated rows, and exchanges from it to the other rank's."""

    def __init__(self, world: World, directory: Path, name: str, num_leaving: int) -> None:
        self._row_bytes, field = SETS[name]
        num_slots, self._num_leaving = 2 * num_leaving, num_leaving
        self._world, self._buffers, self._epochs = world, ParcelBuffers(), itertools.count()
        layout = Layout(world.replicas_per_node, num_slots * world.num_nodes)
        source = Generated(name, layout.num_samples, self._row_bytes)
        fields = {"x": field, "label": Int("label")}
        arguments = Arguments(
            source=source, batch_size=1, fields=fields, reports=Reports(progress=False)
        )
        share = Share(num_slots, num_leaving=num_leaving)
        self._pool = Pool(NodeRows(source, fields, share, arguments, world, directory))
        first = num_slots * world.rank
        ids = np.arange(first, first + num_slots)
        self._pool.ensure(Placement("benchmark", 0, num_slots, lambda: ids))
        self._pool.make_room()

    def exchange(self, *, threaded: bool, seed: int = 2) -> dict[str, float]:
        """Send and receive everything once."""
        peer = 1 - self._world.rank
        slots = cut(self._num_leaving, self._row_bytes, seed=seed)
        parcels = [Parcel(part, peer, tag, 0) for tag, part in enumerate(slots)]
        transfer = Transfer(
            self._world, self._pool.cache, sends=parcels, receives=parcels,
            buffers=self._buffers, threaded=threaded,
        )  # fmt: skip
        transfer.progress(0)
        return transfer.finish(None)

    def free_positions(self) -> NDArray[np.int64]:
        """int64[n]: Where the next exchange writes, in this order."""
        return self._pool.cache.log.space.positions

    def forget(self) -> None:
        """Drop what arrived, and wait until the disk has what was written."""
        self._pool.cache.forget_arrivals()
        # After the flush that the cache has begun.
        for pattern in ("fixed-*", "heap-*"):
            for path in self._pool.cache.directory.glob(pattern):
                with path.open("r+b") as file:
                    os.fdatasync(file.fileno())

    def commit(self) -> None:
        """Commit what arrived, so that the rows that left leave free positions all over."""
        commit_arrivals(self._pool, next(self._epochs) + 1)

    def close(self) -> None:
        """Release the cache."""
        self._pool.close()


def measure(
    world: World, directory: Path, name: str, *, payload_bytes: int, repeats: int
) -> list[dict[str, object]]:
    """Measure one set, with fresh positions, then with scattered ones. Collective."""
    row_bytes = SETS[name][0]
    num_leaving = payload_bytes // row_bytes
    bare, ours = (
        Bare(world, directory, row_bytes, num_leaving),
        Ours(world, directory, name, num_leaving),
    )
    figures: dict[str, dict[str, float]] = {}

    def run(way: str) -> float:
        world.barrier(doing="begin a repeat")
        started = time.perf_counter()
        if way == "ring":
            bare.ring()
        elif way == "steps":
            bare.steps()
        elif way == "there":
            bare.steps_there(ours.free_positions())
        else:
            figures[way] = ours.exchange(threaded=way == "thread")
        mine = np.array([time.perf_counter() - started])
        ours.forget()
        bare.flush()
        return float(world.allreduce(mine, op="max", doing="compare times")[0])

    records = []
    for positions in ("fresh", "scattered"):
        if positions == "scattered":
            # Other rows than those measured, which would lie side by side from then on.
            for seed in (3, 4):
                ours.exchange(threaded=False, seed=seed)
                ours.commit()
        for way in WAYS:
            run(way)
        rounds = [{way: run(way) for way in WAYS} for _ in range(repeats)]
        record = _record(name, positions, num_leaving * row_bytes, rounds, figures)
        records.append(record | describe_machine(directory))
    bare.close()
    ours.close()
    return records


def _record(
    name: str, positions: str, payload_bytes: int, rounds: list[dict[str, float]],
    figures: dict[str, dict[str, float]],
) -> dict[str, object]:  # fmt: skip
    ratios = {
        f"{way}_fraction_of_{bare}": spread([found[bare] / found[way] for found in rounds])
        for way in ("thread", "polling")
        for bare in ("ring", "steps", "there")
    }
    rates = {
        f"{way}_bytes_per_s": round(
            payload_bytes / statistics.median(found[way] for found in rounds)
        )
        for way in WAYS
    }
    costs = {
        f"{way}_cpu_s_per_gb": round(1e9 * found["cpu_s"] / payload_bytes, 3)
        for way, found in figures.items()
    }
    return {
        "question": (__doc__ or "").split("\n")[0],
        "set": name,
        "positions": positions,
        "payload_bytes": payload_bytes,
        "messages": figures["thread"]["messages"],
        "page_cache": "warm",
        "repeats": len(rounds),
        "world_size": 2,
        **ratios,
        **rates,
        **costs,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tonari.bench.exchange.bandwidth")
    parser.add_argument("--sets", nargs="+", choices=sorted(SETS), default=sorted(SETS))
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="on each node")
    parser.add_argument("--payload-mb", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with discover_world() as world:
        if world.num_nodes != 2 or world.world_size != 2:
            raise SystemExit(
                f"exchange_bandwidth: {world.world_size} ranks on {world.num_nodes} nodes, "
                "expected 2 on 2; start it with TONARI_RANKS_PER_NODE=1 mpiexec -n 2"
            )
        for name in options.sets:
            # The ranks may share a machine: each has a directory of its own.
            with tempfile.TemporaryDirectory(dir=options.directory) as directory:
                records = measure(
                    world, Path(directory), name,
                    payload_bytes=options.payload_mb << 20, repeats=options.repeats,
                )  # fmt: skip
            for record in records if world.rank == 0 else []:
                print(json.dumps(record) if options.json else _shown(record), flush=True)


def _shown(record: dict[str, object]) -> str:
    lines = [f"{record['set']}, {record['positions']}: {record['messages']:.0f} messages"]
    lines += [
        f"  {name:28} {value['median']:.3f}" if isinstance(value, dict) else f"  {name:28} {value}"
        for name, value in record.items()
        if name.startswith(WAYS)
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""Verbs, time limits and failures, on ranks that are threads."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dataio.base.errors import StallError, WorldError
from dataio.world import Topology, World, run_threads, single_world, thread_worlds
from dataio.world.collectives import NUM_USER_TAGS, name_ranks, tree_children

LIMIT_S = 0.1
SIZES = range(1, 9)


def outcomes(worlds: list[World], function: Callable[[World], None]) -> list[WorldError | None]:
    """Run every rank to its end without aborting the others; errors are outcomes too."""
    ended: dict[int, WorldError] = {}

    def run(world: World) -> None:
        try:
            function(world)
        except WorldError as error:
            ended[world.rank] = error

    threads = [threading.Thread(target=run, args=(world,)) for world in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [ended.get(world.rank) for world in worlds]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=8))
def test_every_rank_gathers_all_bytes_in_rank_order(parts: list[bytes]) -> None:
    def gather(world: World) -> list[bytes]:
        return world.allgather(parts[world.rank], doing="gathering")

    assert run_threads(thread_worlds([len(parts)]), gather) == [parts] * len(parts)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.floats(width=32), min_size=3, max_size=3), min_size=1, max_size=8))
def test_reductions_are_bitwise_the_same_everywhere(rows: list[list[float]]) -> None:
    def reduce(world: World) -> list[bytes]:
        values = np.array(rows[world.rank], np.float32)
        with np.errstate(all="ignore"):
            return [
                world.allreduce(values, op=op, doing="reducing").tobytes()
                for op in ("sum", "max", "min")
            ]

    results = run_threads(thread_worlds([len(rows)]), reduce)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("size", SIZES)
def test_reductions_and_gathered_arrays(size: int) -> None:
    def use(world: World) -> None:
        mine = np.array([[world.rank, -world.rank]], np.int64)
        ranks = np.arange(size)
        gathered = world.allgather_array(mine, doing="gathering")
        np.testing.assert_array_equal(gathered, np.stack([ranks, -ranks], axis=1)[:, None])
        assert gathered.dtype == np.int64
        assert world.allreduce(mine, op="sum", doing="adding").tolist() == [
            [ranks.sum(), -ranks.sum()]
        ]
        assert world.allreduce(mine, op="max", doing="comparing").tolist() == [[size - 1, 0]]
        assert world.allreduce(mine, op="min", doing="comparing").tolist() == [[0, 1 - size]]
        scalar = world.allreduce(np.array(2.5), op="sum", doing="adding")
        assert (scalar.shape, float(scalar)) == ((), 2.5 * size)
        empty = world.allgather_array(np.empty((0, 3)), doing="gathering")
        assert empty.shape == (size, 0, 3)
        gathered += 1
        world.barrier(doing="ending")

    run_threads(thread_worlds([size]), use)


@pytest.mark.parametrize("size", range(1, 40))
def test_the_tree_reaches_every_rank_once_from_its_parent(size: int) -> None:
    reached = {child: rank for rank in range(size) for child in tree_children(rank, size)}
    assert sorted(reached) == list(range(1, size))
    assert sum(len(tree_children(rank, size)) for rank in range(size)) == size - 1
    assert all(parent == child & (child - 1) for child, parent in reached.items())


def test_a_world_knows_its_place() -> None:
    places = [
        (w.rank, w.node, w.local_rank, w.local_size, w.replica) for w in thread_worlds((2, 1))
    ]
    assert places == [(0, 0, 0, 2, 0), (1, 0, 1, 2, 1), (2, 1, 0, 1, 2)]
    world = thread_worlds((2, 1))[2]
    assert (world.world_size, world.num_nodes, world.num_replicas) == (3, 2, 3)
    assert world.replicas_per_node == (2, 1)
    assert world.rank_of_replica(2) == 2


def test_messages_of_one_tag_arrive_in_order_and_are_copied_when_sent() -> None:
    def use(world: World) -> list[int]:
        if world.rank == 1:
            data = np.array([1], np.uint8)
            for number in (1, 2, 3):
                data[:] = number
                world.isend(data, dest=0, tag=7)
            return []
        into = [np.empty(1, np.uint8) for _ in range(3)]
        requests = [world.irecv(buffer, source=1, tag=7) for buffer in into]
        world.wait(requests[::-1], peers=[1, 1, 1], doing="receiving")
        return [int(buffer[0]) for buffer in into]

    assert run_threads(thread_worlds([2]), use)[0] == [1, 2, 3]


def test_rank_0_names_exactly_the_ranks_that_do_not_come() -> None:
    def come(world: World) -> None:
        if world.rank not in (2, 3, 5):
            world.barrier(doing="turning the epoch")

    ended = outcomes(thread_worlds([7], LIMIT_S), come)
    assert isinstance(ended[0], StallError)
    expected = (
        r"rank 0: waited 0.1 s for ranks 2-3, 5 while turning the epoch .*; each was expected .*"
    )
    with pytest.raises(StallError, match=expected + r"raise timeout_s"):
        raise ended[0]


def test_the_first_message_is_rank_0s() -> None:
    first: list[str] = []

    def come(world: World) -> None:
        if world.rank == 3:
            return
        try:
            world.barrier(doing="turning the epoch")
        except StallError as error:
            first.append(str(error))
            raise

    outcomes(thread_worlds([8], LIMIT_S), come)
    assert first[0].startswith("rank 0: waited 0.1 s for rank 3 while")


def test_a_stalled_rank_0_is_named_by_its_children_before_anyone_else_gives_up() -> None:
    order: list[tuple[int, str]] = []

    def come(world: World) -> None:
        if world.rank == 0:
            return
        try:
            world.barrier(doing="turning the epoch")
        except StallError as error:
            order.append((world.rank, str(error)))
            raise

    outcomes(thread_worlds([4], LIMIT_S), come)
    assert {rank for rank, _ in order[:2]} == {1, 2}
    assert all("for rank 0 while turning the epoch" in message for _, message in order[:2])


def test_a_wait_that_stalls_names_its_peers_and_what_was_done() -> None:
    world = thread_worlds([4])[0]
    requests = [world.irecv(np.empty(3, np.uint8), source=peer, tag=1) for peer in (1, 3)]
    with pytest.raises(StallError, match=r"waited 0.01 s for ranks 1, 3 while receiving rows"):
        world.wait(requests, peers=[1, 3], doing="receiving rows", timeout_s=0.01)


def test_ranks_in_different_collectives_are_both_named_everywhere() -> None:
    def differ(world: World) -> None:
        if world.rank == 2:
            world.allgather(b"x", doing="gathering scores")
        else:
            world.barrier(doing="turning the epoch")

    for error in outcomes(thread_worlds([4]), differ):
        assert isinstance(error, WorldError)
        assert "rank 0 is at collective 1, 'turning the epoch (barrier)'" in str(error)
        assert "rank 2 is at collective 1, 'gathering scores (allgather)'" in str(error)
        assert "in the same order" in str(error)


def test_a_rank_that_skipped_a_collective_is_named() -> None:
    def skip(world: World) -> None:
        for _ in range(1 if world.rank == 1 else 2):
            world.barrier(doing="counting")
        world.barrier(doing="ending")

    with pytest.raises(WorldError, match=r"rank 1 is at collective 2, 'ending \(barrier\)'"):
        run_threads(thread_worlds([3]), skip)


@pytest.mark.parametrize("other", [np.zeros(3), np.zeros(2, np.float32)])
def test_arrays_that_differ_are_an_error_that_names_who(other: NDArray[np.floating]) -> None:
    def differ(world: World) -> None:
        values = other if world.rank == 2 else np.zeros(2)
        world.allgather_array(values, doing="gathering scores")

    for error in outcomes(thread_worlds([3]), differ):
        assert isinstance(error, WorldError)
        assert "while gathering scores, rank 2 gave <f" in str(error)
        assert "rank 0 <f8[2]" in str(error)

    with pytest.raises(WorldError, match="same dtype and shape"):
        run_threads(
            thread_worlds([3]),
            lambda world: world.allreduce(
                other if world.rank == 1 else np.zeros(2), op="sum", doing="adding"
            ),
        )


def test_the_first_error_ends_every_rank_at_once() -> None:
    start = time.monotonic()

    def fail(world: World) -> None:
        if world.rank == 1:
            raise OSError("disk on fire")
        world.barrier(doing="waiting")

    with pytest.raises(OSError, match="disk on fire"):
        run_threads(thread_worlds([4], 30.0), fail)
    assert time.monotonic() - start < 5


def test_abort_reaches_ranks_that_wait() -> None:
    def abort(world: World) -> None:
        if world.rank == 2:
            world.abort("enough")
        world.barrier(doing="waiting")

    for error in outcomes(thread_worlds([4]), abort):
        assert isinstance(error, WorldError)
        assert str(error) == "[rank 2] enough"


def test_a_message_of_another_length_is_an_error() -> None:
    def use(world: World) -> None:
        if world.rank == 0:
            world.isend(np.zeros(3, np.uint8), dest=1, tag=0)
            return
        request = world.irecv(np.zeros(2, np.uint8), source=0, tag=0)
        world.wait([request], peers=[0], doing="receiving")

    with pytest.raises(WorldError, match="received 3 bytes from rank 0 with tag 0, expected 2"):
        run_threads(thread_worlds([2]), use)


def test_wrong_arguments_are_refused_before_anything_is_sent() -> None:
    world, data = thread_worlds([2])[0], np.zeros(2, np.uint8)
    for peer in (0, 2, -1):
        with pytest.raises(ValueError, match="name another rank"):
            world.isend(data, dest=peer, tag=0)
    for tag in (-1, NUM_USER_TAGS):
        with pytest.raises(ValueError, match="tag"):
            world.irecv(data, source=1, tag=tag)
    bad: list[NDArray[Any]] = [data[::-1], data[:0], np.zeros(2), np.zeros((2, 2), np.uint8)]
    for wrong in bad:
        with pytest.raises(ValueError, match="contiguous uint8"):
            world.isend(wrong, dest=1, tag=0)
    with pytest.raises(ValueError, match="read-only"):
        world.irecv(np.frombuffer(b"ab", np.uint8), source=1, tag=0)
    with pytest.raises(TypeError, match="send numbers"):
        single_world().allgather_array(np.array([{}]), doing="gathering")
    with pytest.raises(ValueError, match="the topology has 3 ranks, the transport 2"):
        World(world._transport, Topology((0, 0, 0)))
    with pytest.raises(ValueError, match="timeout_s is 0, must be > 0"):
        thread_worlds([2], 0)


def test_a_world_of_one_is_trivial() -> None:
    with single_world() as world:
        assert (world.rank, world.world_size, world.node, world.replica) == (0, 1, 0, 0)
        assert world.allgather(b"x", doing="gathering") == [b"x"]
        assert world.allgather_array(np.arange(2), doing="gathering").tolist() == [[0, 1]]
        assert world.allreduce(np.arange(2), op="sum", doing="adding").tolist() == [0, 1]
        world.barrier(doing="ending")
        with pytest.raises(ValueError, match="name another rank"):
            world.isend(np.zeros(1, np.uint8), dest=0, tag=0)
        with pytest.raises(SystemExit, match="enough"):
            world.abort("enough")


def test_ranks_are_named_in_ranges() -> None:
    assert name_ranks([4]) == "rank 4"
    assert name_ranks([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"

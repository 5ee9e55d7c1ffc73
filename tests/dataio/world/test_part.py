"""Some ranks of a world are a world of their own, beside the whole."""

import numpy as np
import pytest

from dataio import StallError
from dataio.world import run_threads, thread_worlds
from dataio.world.world import NUM_CHANNELS


def test_a_part_numbers_its_ranks_and_nodes_anew_and_the_whole_goes_on_beside_it():
    def run(world):
        if world.rank in (1, 3, 4):
            part = world.part([1, 3, 4])
            told = part.allgather(f"{world.rank}".encode(), doing="tell")
            total = part.allreduce(np.array([world.rank]), op="sum", doing="add").tolist()
            mine = (part.rank, part.node, part.replicas_per_node, told, total)
        else:
            mine = None
        return mine, len(world.allgather(b"", doing="end"))

    found = run_threads(thread_worlds([2, 1, 2]), run)
    told = [b"1", b"3", b"4"]
    assert [mine for mine, _ in found] == [
        None, (0, 0, (1, 2), told, [8]), None, (1, 1, (1, 2), told, [8]), (2, 1, (1, 2), told, [8])
    ]  # fmt: skip
    assert [size for _, size in found] == [5] * 5


def test_messages_of_a_part_and_of_the_whole_do_not_meet():
    def run(world):
        part = world.part([0, 1])
        tags = world.open_channel(), part.open_channel()
        into = [np.zeros(1, np.uint8) for _ in tags]
        other = 1 - world.rank
        # Posted in one order, sent in the other
        requests = [
            user.irecv(buffer, source=other, tag=tag)
            for user, buffer, tag in zip((world, part), into, tags, strict=True)
        ]
        for user, tag, value in ((part, tags[1], 7), (world, tags[0], 5)):
            requests.append(user.isend(np.array([value], np.uint8), dest=other, tag=tag))
        world.wait(requests, peers=[other] * 4, doing="swap")
        return [int(buffer[0]) for buffer in into], tags[1] // 4096

    assert run_threads(thread_worlds([1, 1]), run) == [([5, 7], NUM_CHANNELS)] * 2


def test_a_part_is_made_once_and_its_parts_have_channels_of_their_own():
    def run(world):
        part = world.part([0, 1])
        inner = part.part([world.rank])
        tags = [each.open_channel() for each in (world, part, inner, world.part([0, 1]))]
        return world.part([0, 1]) is part, len(set(tags)), part.parts

    for same, num_tags, parts in run_threads(thread_worlds([2]), run):
        assert (same, num_tags, len(parts)) == (True, 4, 1)


def test_a_stall_in_a_part_names_the_ranks_of_the_job():
    def run(world):
        world.timeout_s = 0.1
        if world.rank == 3:
            return None
        if world.rank == 0:
            return None
        part = world.part([1, 2, 3])
        with pytest.raises(StallError) as caught:
            part.wait(
                [part.irecv(np.empty(1, np.uint8), source=2, tag=0)], peers=[2], doing="listen"
            )
        return str(caught.value)

    found = run_threads(thread_worlds([4]), run)
    assert "rank 1: waited 0.1 s for rank 3 while listen" in found[1]

"""Which CUDA device a rank takes."""

import pytest

from dataio.world import World, run_threads, thread_worlds
from trainer.errors import ConfigError
from trainer.launch import choose_device

TWO_NODES = (2, 2)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([["a", "b"], ["a", "b"], ["c", "d"], ["c", "d"]], [0, 1, 0, 1]),
        # As srun --gpus-per-task shows them: each its own, which it counts from 0.
        ([["a"], ["b"], ["c"], ["d"]], [0, 0, 0, 0]),
        ([["a"], ["b"], ["c", "d"], ["c", "d"]], [0, 0, 0, 1]),
    ],
)
def test_each_rank_of_a_node_takes_a_device_of_its_own(
    seen: list[list[str]], expected: list[int]
) -> None:
    def choose(world: World) -> int:
        return choose_device(world, seen[world.rank])

    assert run_threads(thread_worlds(TWO_NODES), choose) == expected


def test_fewer_devices_than_ranks_are_refused() -> None:
    def choose(world: World) -> str:
        try:
            return str(choose_device(world, ["a"] if world.rank < 2 else ["c", "d"]))
        except ConfigError as error:
            return str(error)

    told = run_threads(thread_worlds(TWO_NODES), choose)
    assert [told[0], *told[2:]] == ["0", "0", "1"]
    assert told[1].startswith("rank 1: local rank 1, but it sees 1 CUDA devices; start at most 1")

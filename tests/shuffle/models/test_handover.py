"""When the bytes travel: never waited for early, in bounded messages, checked first."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataio.base.errors import ExchangeError
from dataio.world import World, run_threads, thread_worlds
from shuffle.models.handover import Handover
from tests.shuffle.models.replicas import Replica, bits, train


class SlowWorld:
    """A world whose messages are seen as done only after a drawn number of looks."""

    def __init__(self, world: World, seed: int) -> None:
        self._world, self._rng = world, np.random.default_rng([seed, world.rank])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    def isend(self, *args: Any, **options: Any) -> Any:
        return self._delayed(self._world.isend(*args, **options))

    def irecv(self, *args: Any, **options: Any) -> Any:
        return self._delayed(self._world.irecv(*args, **options))

    def _delayed(self, request: Any) -> Any:
        looks = iter(range(int(self._rng.integers(0, 30))))
        return SimpleNamespace(test=lambda: next(looks, None) is None and request.test())


@pytest.mark.parametrize("mode", ["average", "swap"])
@pytest.mark.parametrize("overlap", [0, 1, 3, 4])
def test_the_result_does_not_depend_on_when_the_bytes_come(mode: str, overlap: int) -> None:
    def final(wrap: Callable[[World], Any]) -> list[dict[str, bytes]]:
        worlds = thread_worlds([3])
        return run_threads(
            worlds,
            lambda world: bits(
                Replica(wrap(world), every=4, mode=mode, overlap=overlap).run(19).tensors()
            ),
        )

    prompt = final(lambda world: world)
    assert final(lambda world: SlowWorld(world, 1)) == prompt
    assert final(lambda world: SlowWorld(world, 2)) == prompt
    assert prompt[0] != prompt[1]


def test_nothing_waits_for_a_partner_before_a_round_is_due() -> None:
    """The partner takes no step at all until this replica has taken all but the last."""
    ahead = threading.Event()

    def act(world: World) -> float:
        replica = Replica(world, every=4, overlap=4)
        replica.run(3)
        replica.exchange._apart = True  # the first round's question to all is asked elsewhere
        if world.rank == 1:
            assert ahead.wait(20)
        replica.run(4)
        if world.rank == 0:
            ahead.set()
        replica.run(1)
        return replica.exchange.stats()["rounds"]

    assert run_threads(thread_worlds([2]), act) == [1, 1]


def test_figures_tell_what_was_sent_and_what_came_in_time() -> None:
    for replica in train(2, 13, every=4, overlap=4):
        stats = replica.exchange.stats()
        assert stats["rounds"] == 2
        assert stats["sent_bytes"] == 3 * replica.exchange.round_bytes or (
            stats["sent_bytes"] == 2 * replica.exchange.round_bytes
        )
        assert stats["messages"] == 4, "a header and a state, a round"
        assert 0 <= stats["overlap_fraction"] <= 1
        assert stats["blocked_s"] >= 0


def test_figures_of_three_replicas_count_the_rounds_sat_out() -> None:
    ended = [replica.exchange.stats() for replica in train(3, 12, every=2, overlap=0)]
    assert sum(stats["rounds_alone"] for stats in ended) == 6
    assert all(stats["rounds"] + stats["rounds_alone"] == 6 for stats in ended)


def test_a_large_state_travels_in_messages_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    def act(world: World) -> bool:
        mine = np.arange(1000, dtype=np.uint8) + np.uint8(world.rank)
        theirs = np.zeros(1000, np.uint8)
        header = np.array([1], np.uint64)
        trade = Handover(
            world, peer=1 - world.rank, tag=0, mine=mine, theirs=theirs, header=header,
            check=lambda found: None, doing="testing", max_message_bytes=64,
        )  # fmt: skip
        trade.wait()
        sizes.append(trade.messages)
        return bool((theirs - mine == (1 if world.rank == 0 else 255)).all())

    assert all(run_threads(thread_worlds([2]), act))
    assert sizes == [17, 17]


def test_at_most_four_messages_are_under_way_in_each_direction() -> None:
    world = thread_worlds([2])[0]
    posted: list[int] = []
    never = SimpleNamespace(test=lambda: False)
    done = SimpleNamespace(test=lambda: True)

    class Counting:
        def isend(self, data: np.ndarray, **_: Any) -> Any:
            posted.append(len(data))
            return done if len(posted) == 1 else never

        def irecv(self, into: np.ndarray, **_: Any) -> Any:
            return done

    assert world.rank == 0
    trade = Handover(
        Counting(),  # type: ignore[arg-type]
        peer=1, tag=0, mine=np.zeros(100, np.uint8), theirs=np.zeros(100, np.uint8),
        header=np.array([1], np.uint64), check=lambda found: None, doing="testing",
        max_message_bytes=10,
    )  # fmt: skip
    for _ in range(5):
        assert not trade.poll()
    assert posted == [8, 10, 10, 10, 10]


def test_no_state_is_sent_before_both_agree_on_what_it_is() -> None:
    posted: list[int] = []
    answers = iter([False, False, True])

    class Counting:
        def isend(self, data: np.ndarray, **_: Any) -> Any:
            posted.append(len(data))
            return SimpleNamespace(test=lambda: True)

        def irecv(self, into: np.ndarray, **_: Any) -> Any:
            return SimpleNamespace(test=lambda: next(answers))

    def refuse(found: np.ndarray) -> None:
        raise ExchangeError("not the same")

    trade = Handover(
        Counting(),  # type: ignore[arg-type]
        peer=1, tag=0, mine=np.zeros(9, np.uint8), theirs=np.zeros(9, np.uint8),
        header=np.array([1], np.uint64), check=refuse, doing="testing",
    )  # fmt: skip
    assert not trade.poll()
    assert not trade.poll()
    with pytest.raises(ExchangeError, match="not the same"):
        trade.poll()
    assert posted == [8]

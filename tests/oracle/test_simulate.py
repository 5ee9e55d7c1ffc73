"""Steps of ranks, event by event, on a machine that is all invented."""

from dataclasses import dataclass, field, replace

import pytest

from tonari.oracle.costs import Feed, Resource, TaskCost
from tonari.oracle.errors import OracleError
from tonari.oracle.record import Message, Wait
from tonari.oracle.simulate import simulate
from tonari.oracle.stopwatch import Timed

BYTES = 100


@dataclass
class Bench:
    """A machine: cores that are shared or not, and messages of one length."""

    message_s: float = 1.0
    num_cores: float = float("inf")
    takes: tuple[tuple[Resource, float], ...] = ()
    asked: list[tuple[str, tuple[int, ...], int]] = field(default_factory=list)

    def cores(self, rank: int) -> Resource:
        return ("cores",)

    def compute(self, rank: int, seconds: float) -> TaskCost:
        return TaskCost(seconds, ((self.cores(rank), 1.0),))

    def message(self, kind: str, ranks: tuple[int, ...], num_bytes: int) -> TaskCost:
        self.asked.append((kind, ranks, num_bytes))
        return TaskCost(self.message_s, self.takes)

    def slowdown(self, resource: Resource, demand: float) -> float:
        return max(1.0, demand / self.num_cores) if resource == ("cores",) else max(1.0, demand)


def program(rank: int, *parts: float | Message | Wait) -> Timed:
    """Make a program of seconds and events; between two events nothing is computed."""
    events, before_s = [], [0.0]
    for part in parts:
        if isinstance(part, Message | Wait):
            events.append(part)
            before_s.append(0.0)
        else:
            before_s[-1] += part
    return Timed(rank=rank, events=tuple(events), laps_s=(tuple(before_s),), step_s=())


def together(*ranks: int, kind: str = "all_reduce") -> Message:
    return Message(kind, ranks, BYTES)


def test_a_rank_alone_takes_what_it_computes():
    found = simulate([program(0, 2.0)], Bench(), steps=3)
    assert found.step_ends_s == (2.0, 4.0, 6.0)
    assert found.step_s == 2.0
    assert found.parts_s() == {"compute": 2.0}


def test_the_slower_rank_decides_when_a_message_begins():
    parts = (together(0, 1), Wait(0), 1.0)
    found = simulate([program(0, 2.0, *parts), program(1, 5.0, *parts)], Bench(), steps=1)
    # Both wait until 5, a second more for the message, and compute for another
    assert found.step_ends_s == (7.0,)
    waits = {span.rank: (span.start_s, span.end_s) for span in found.spans if "all" in span.name}
    assert waits == {0: (2.0, 6.0), 1: (5.0, 6.0)}


def test_a_message_that_nobody_waits_for_yet_is_under_way_while_its_ranks_compute():
    parts = (1.0, together(0, 1), 3.0, Wait(0))
    found = simulate([program(0, *parts), program(1, *parts)], Bench(message_s=2.0), steps=1)
    assert found.step_s == 4.0
    late = simulate([program(0, *parts), program(1, *parts)], Bench(message_s=5.0), steps=1)
    assert late.step_s == 6.0


def test_without_messages_that_take_time_computation_is_all():
    ring = (1.5, together(0, 1, 2), Wait(0), 0.5, together(0, 1, 2), Wait(1))
    found = simulate([program(rank, *ring) for rank in range(3)], Bench(message_s=0.0))
    assert found.step_s == 2.0
    assert found.parts_s() == pytest.approx({"compute": 2.0})


def test_a_send_is_one_message_of_two_ranks_by_its_direction():
    bench = Bench()
    first = program(0, 1.0, Message("send", (0, 1), BYTES, 1), Wait(0))
    second = program(1, Message("receive", (0, 1), BYTES, 0), Wait(0), 4.0)
    found = simulate([first, second], bench, steps=1)
    assert bench.asked == [("send", (0, 1), BYTES)]
    assert found.step_ends_s == (6.0,)
    assert {(s.rank, s.name, s.end_s) for s in found.spans if s.name != "compute"} == {
        (0, "send", 2.0), (1, "receive", 2.0)
    }  # fmt: skip


def test_sends_both_ways_are_not_mistaken_for_each_other():
    def both(own: int, peer: int) -> Timed:
        pair = (0, 1)
        return program(
            own, Message("send", pair, BYTES, peer), Message("receive", pair, BYTES, peer),
            Wait(1), 1.0, Wait(0),
        )  # fmt: skip

    bench = Bench()
    assert simulate([both(0, 1), both(1, 0)], bench, steps=2).step_ends_s == (2.0, 4.0)
    assert sorted(bench.asked) == [("send", (0, 1), 100)] * 2 + [("send", (1, 0), 100)] * 2


def test_messages_of_one_group_are_told_apart_by_their_order():
    one = program(0, together(0, 1), 1.0, together(0, 1, kind="broadcast"), Wait(1), Wait(0))
    two = program(1, 2.0, together(0, 1), together(0, 1, kind="broadcast"), Wait(0), Wait(1))
    found = simulate([one, two], Bench(), steps=2)
    assert found.step_ends_s == (3.0, 6.0)


def test_ranks_that_want_more_cores_than_there_are_take_as_much_longer():
    found = simulate([program(rank, 1.0) for rank in range(4)], Bench(num_cores=2), steps=1)
    assert found.step_ends_s == (2.0,)
    # One has less to do: from then on the others have more of the cores
    short = [program(0, 1.0), program(1, 2.0)]
    assert simulate(short, Bench(num_cores=1), steps=1).step_ends_s == (3.0,)


def test_messages_on_one_link_share_it():
    bench = Bench(message_s=1.0, takes=((("link",), 1.0),))
    pairs = [program(rank, together(*pair), Wait(0)) for rank, pair in
             enumerate([(0, 1), (0, 1), (2, 3), (2, 3)])]  # fmt: skip
    assert simulate(pairs, bench, steps=1).step_ends_s == (2.0,)
    assert simulate(pairs, Bench(), steps=1).step_ends_s == (1.0,)


def test_a_message_takes_cores_from_computation():
    bench = Bench(num_cores=1, takes=((("cores",), 1.0),))
    pair = [program(rank, together(0, 1), Wait(0)) for rank in (0, 1)]
    found = simulate([*pair, program(2, 2.0)], bench, steps=1)
    # Both at half the pace: the message ends after two seconds, what remains has a core to itself
    assert found.step_ends_s == (3.0,)


def test_the_first_step_is_not_counted_among_others():
    # The second rank begins late once, and the first does not wait for it
    first = program(0, 3.0, Message("send", (0, 1), BYTES, 1))
    second = program(1, Message("receive", (0, 1), BYTES, 0), Wait(0), 1.0)
    found = simulate([first, second], Bench(), steps=3)
    assert found.step_ends_s == (5.0, 8.0, 11.0)
    assert found.step_s == 3.0


def test_ranks_that_meet_often_wait_for_the_slower_one_each_time():
    # Each lap lasts 1 or 3 seconds: alone a step of 50 laps takes 100 on average; of two ranks the
    # slower one lasts 2.5 on average, of four nearly 2.9
    def drawn(rank: int, ranks: tuple[int, ...]) -> Timed:
        events = [each for number in range(50) for each in (together(*ranks), Wait(number))]
        laps = tuple(tuple([seconds, 0.0] * 50 + [0.0]) for seconds in (1.0, 3.0))
        return Timed(rank=rank, events=tuple(events), laps_s=laps, step_s=())

    for size, expected_s in ((1, 100), (2, 125), (4, 144)):
        ranks = tuple(range(size))
        found = simulate([drawn(rank, ranks) for rank in ranks], Bench(message_s=0.0), steps=40)
        assert found.step_s == pytest.approx(expected_s, rel=0.06)
        again = simulate([drawn(rank, ranks) for rank in ranks], Bench(message_s=0.0), steps=40)
        assert again == found


def test_ranks_that_wait_for_each_other_for_ever_are_named():
    ranks = [program(0, together(0, 1), Wait(0)), program(1, 1.0)]
    with pytest.raises(OracleError, match=r"ranks \[0\] wait for messages that nobody sends"):
        simulate(ranks, Bench(), steps=1)


CORE: tuple[tuple[Resource, float], ...] = ((("cores",), 1.0),)
LINK: tuple[tuple[Resource, float], ...] = ((("link",), 1.0),)


@pytest.mark.parametrize(
    ("batch_s", "ahead", "step_s"),
    [
        (0.0, 0, 2.0),  # a batch is there
        (1.0, 0, 3.0),  # made when it is asked for
        (1.0, 1, 2.0),  # made while the one before is trained
        (2.0, 1, 2.0),
        (5.0, 1, 5.0),  # the loader is the slower one, however far ahead it may go
        (5.0, 4, 5.0),
    ],
)
def test_a_step_waits_for_its_batch(batch_s, ahead, step_s):
    feed = Feed(batch=TaskCost(batch_s), ahead=ahead)
    found = simulate([program(0, 2.0)], Bench(), feeds={0: feed}, steps=9)
    assert found.step_s == pytest.approx(step_s)
    # The first batch is waited for whatever is made ahead
    assert found.step_ends_s[0] == pytest.approx(batch_s + 2.0)
    assert found.parts_s().get("data", 0.0) * 9 == pytest.approx(batch_s + 8 * (step_s - 2.0))


def test_a_loader_takes_cores_from_its_rank():
    feed = Feed(batch=TaskCost(1.0, CORE), ahead=2)
    found = simulate([program(0, 2.0)], Bench(num_cores=1), feeds={0: feed}, steps=20)
    assert found.step_s == pytest.approx(3.0)
    assert simulate([program(0, 2.0)], Bench(num_cores=2), feeds={0: feed}, steps=20).step_s == 2.0


@pytest.mark.parametrize(("share", "step_s"), [(0.0, 4.0), (0.2, 4.0), (0.8, 4.0), (1.0, 4.6)])
def test_a_loader_that_waits_for_a_disk_leaves_its_cores_time_to_be_slower(share, step_s):
    """It takes 4 s of the disk, and the share of that of a core, of which the rank takes 3 s."""
    bench, disk = Bench(num_cores=1), ("disk",)
    demands = ((("cores",), 0.2), (disk, 1.0))
    feed = Feed(batch=TaskCost(4.0, demands, (share, 1.0)), ahead=2)
    found = simulate([program(0, 3.0)], bench, feeds={0: feed}, steps=41)
    assert found.step_s == pytest.approx(step_s, rel=0.01)


def test_loaders_that_are_busy_with_a_disk_for_a_part_of_a_batch_get_no_more_than_it_has():
    """Each batch takes 5 s of a core, and beside that 4 s of the disk that two loaders read."""
    feed = Feed(batch=TaskCost(5.0, (*CORE, (("disk",), 0.8)), (1.0, 0.8)), ahead=2)
    ranks = [program(rank, 1.0) for rank in (0, 1)]
    for readers, step_s in ((1, 5.0), (2, 8.0)):
        feeds = dict.fromkeys(range(readers), feed)
        assert simulate(ranks, Bench(), feeds=feeds, steps=9).step_s == pytest.approx(step_s)


@pytest.mark.parametrize("disk_s", [0.0, 1.0, 1.5, 2.0])
def test_a_disk_that_is_waited_for_makes_no_step_of_contended_cores_shorter(disk_s):
    """A rank and its loader have a core, and take 4 s of it."""
    batch_s = max(disk_s, 1.0)
    demands = ((("cores",), 1.0 / batch_s), (("disk",), disk_s / batch_s))
    feed = Feed(batch=TaskCost(batch_s, demands, (1.0 / batch_s, disk_s / batch_s)), ahead=2)
    found = simulate([program(0, 3.0)], Bench(num_cores=1), feeds={0: feed}, steps=21)
    assert found.step_s == pytest.approx(4.0)


def test_a_rank_without_a_loader_waits_for_none():
    feed = Feed(batch=TaskCost(9.0), ahead=0)
    assert simulate([program(0, 2.0)], Bench(), feeds={1: feed}, steps=3).step_s == 2.0


def test_gradients_and_what_leaves_beside_them_share_a_link():
    pair = [program(rank, 1.0, together(0, 1), Wait(0)) for rank in (0, 1)]
    feeds = {0: Feed(batch=TaskCost(0.0), ahead=1, sends=(TaskCost(0.5, LINK),))}
    alone = simulate(pair, Bench(takes=LINK), steps=9)
    both = simulate(pair, Bench(takes=LINK), feeds=feeds, steps=9)
    # It has left before the gradients come
    assert (alone.step_s, both.step_s, both.behind_s) == (2.0, 2.0, 0.0)
    longer = {
        0: Feed(batch=TaskCost(0.0), ahead=1, sends=(TaskCost(0.75, LINK), TaskCost(0.75, LINK)))
    }
    # One second passes alone; the other half shares the link with a second of gradients
    found = simulate(pair, Bench(takes=LINK), feeds=longer, steps=9)
    assert found.step_s == pytest.approx(2.5)
    assert found.behind_s == pytest.approx(0.0)


def test_what_cannot_leave_in_time_is_left_at_the_end():
    feeds = {0: Feed(batch=TaskCost(0.0), ahead=1, sends=(TaskCost(3.0, LINK),))}
    found = simulate([program(0, 2.0)], Bench(), feeds=feeds, steps=10)
    assert found.step_s == 2.0
    assert found.behind_s == pytest.approx(10 * 3.0 - 10 * 2.0)


def test_what_two_leave_behind_shares_their_link():
    feed = Feed(batch=TaskCost(0.0), ahead=1, sends=(TaskCost(3.0, LINK),))
    pair = [program(rank, 2.0) for rank in (0, 1)]
    found = simulate(pair, Bench(), feeds={0: feed, 1: feed}, steps=10)
    assert found.step_s == 2.0
    assert found.behind_s == pytest.approx(2 * 10 * 3.0 - 10 * 2.0)


def on_gpu(of_rank: Timed, *issuing_s: float, copy_s: float = 0.0) -> Timed:
    """Let a GPU compute a program, whose laps its host issues."""
    return replace(of_rank, issuing_s=(issuing_s,), copy_s=copy_s)


@pytest.mark.parametrize(
    ("computing_s", "issuing_s", "copy_s", "step_s", "waits"),
    [
        (3.0, 2.0, 1.0, 3.0, {}),
        (3.0, 5.0, 1.0, 5.0, {"issuing": 2.0}),
        (3.0, 2.0, 7.0, 7.0, {"copy": 4.0}),
    ],
)
def test_a_step_on_a_gpu_takes_what_kernels_issuing_or_copies_do(
    computing_s, issuing_s, copy_s, step_s, waits
):
    found = simulate(
        [on_gpu(program(0, computing_s), issuing_s, copy_s=copy_s)], Bench(), steps=4
    )  # fmt: skip
    # The first batch is waited for
    assert found.step_ends_s[0] == copy_s + max(computing_s, issuing_s - copy_s)
    assert found.steps_s == (step_s,) * 3
    parts_s = found.parts_s()
    assert parts_s.pop("compute") == computing_s
    assert set(parts_s) == {"copy", *waits}
    for name, seconds in waits.items():
        assert parts_s[name] == pytest.approx(seconds, abs=2 * copy_s / 4)


def test_a_host_that_is_ahead_waits_for_no_message_and_its_gpu_does():
    parts = (together(0, 1), Wait(0), 1.0)
    found = simulate(
        [on_gpu(program(0, 2.0, *parts), 0.1, 0.1, 0.1), program(1, 5.0, *parts)], Bench(), steps=3
    )
    assert found.step_ends_s == (7.0, 14.0, 21.0)
    assert {span.name for span in found.spans if span.rank == 0} == {"compute", "all_reduce"}


def test_a_lap_that_is_issued_late_is_waited_for_where_it_is():
    # Of the first lap the GPU waits for the host, and so does the message
    parts = (together(0, 1), Wait(0), 4.0)
    ranks = [on_gpu(program(0, 1.0, *parts), 3.0, 0.0, 1.0), program(1, 1.0, *parts)]
    found = simulate(ranks, Bench(), steps=1)
    assert found.step_ends_s == (8.0,)
    own = [(span.name, span.start_s, span.end_s) for span in found.spans if span.rank == 0]
    assert own == [
        ("compute", 0.0, 1.0), ("issuing", 1.0, 3.0), ("all_reduce", 3.0, 4.0),
        ("compute", 4.0, 8.0),
    ]  # fmt: skip


def test_a_host_runs_ahead_of_its_gpu_by_a_step():
    asked = []

    class Counting(Bench):
        def compute(self, rank, seconds):
            asked.append(seconds)
            return super().compute(rank, seconds)

    simulate([on_gpu(program(0, 8.0), 0.5)], Counting(), steps=1)
    assert asked == [0.5, 0.5]


def test_a_gpu_waits_for_a_loader_that_is_slower_and_two_batches_come_before_the_first_step():
    feed = Feed(batch=TaskCost(9.0), ahead=2)
    found = simulate([on_gpu(program(0, 8.0), 0.5)], Bench(), feeds={0: feed}, steps=4)
    # One is copied while the other is trained
    assert found.step_ends_s == (26.0, 35.0, 44.0, 53.0)
    assert found.parts_s()["data"] == pytest.approx((18.0 + 3 * 1.0) / 4)

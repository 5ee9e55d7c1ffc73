"""Ranks are lost at any moment: the others train on, each sample once, as one process would."""

import asyncio
import contextlib
import errno
import gc
import json
import os
import queue
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo  # type: ignore[attr-defined]

import dataio
import dataio.job.live as live_module
import dataio.job.meeting as meeting_module
from dataio.base.atomic import write_file
from dataio.base.errors import StateError, WorldError
from dataio.job.live import describe, restore
from dataio.job.meeting import Meeting
from dataio.job.numbers import find_job
from dataio.job.sockets import Sockets
from dataio.world import run_threads, single_world, thread_worlds
from importance import InfoBatch
from tests.dataio.job.live_ranks import EPOCHS, LIMIT_S, NUM_SAMPLES, loss_of, make, samples
from tests.memory_source import FIELDS, MemorySource
from tests.multirank import ROOT, job_environ, python_command

Faults = dict[str, list[Any]]
PLACES = ("kept", "epoch", "batch", "forward", "gathered", "averaged", "stepped", "epoch end")


def run(out: Path, num_ranks: int, faults: Faults, **options: object) -> list[int]:
    """Train, and return the ranks' exit statuses."""
    given = {"timeout_s": 20.0, "patience_s": 4.0, **options}
    subprocess.run(
        [*python_command(), "-m", "tests.dataio.job.live_ranks", str(out), str(num_ranks),
         json.dumps(faults), json.dumps(given)],
        check=True, timeout=LIMIT_S + 60, env=job_environ(), cwd=ROOT,
    )  # fmt: skip
    statuses: list[int] = json.loads((out / "ended.json").read_text())
    return statuses


def said(out: Path, rank: int) -> str:
    return (out / f"said-{rank}").read_text()


def steps_of(out: Path, rank: int) -> list[list[Any]]:
    """Read the steps that a rank has counted: number, epoch, rows, ranks, loss, time."""
    path = out / f"steps-{rank}.jsonl"
    return [*map(json.loads, path.read_text().splitlines())] if path.exists() else []


def check(
    out: Path, num_ranks: int, *, left: list[int], num_samples: int = NUM_SAMPLES
) -> list[list[Any]]:
    """Check what was trained; return with whom, and from which step on, the first that is left did.

    All that wrote a step wrote the same, an epoch has each sample once, and losses and weights are
    those of one process that is given the same rows.
    """
    steps: dict[int, list[Any]] = {}
    for rank in range(num_ranks):
        for number, *its, _ in steps_of(out, rank):
            assert steps.setdefault(number, its) == its
    assert sorted(steps) == [*range(1, len(steps) + 1)]
    trained: dict[int, list[int]] = {epoch: [] for epoch in range(EPOCHS)}
    model, optimizer, schedule = make()
    inputs, targets = map(torch.from_numpy, samples(num_samples))
    for _, (epoch, ids, world_size, loss) in sorted(steps.items()):
        trained[epoch] += ids
        optimizer.zero_grad()
        whole = loss_of(model, inputs[ids], targets[ids])
        assert whole.item() == pytest.approx(loss, rel=1e-9)
        (whole / world_size).backward()
        optimizer.step()
        schedule.step()
    assert all(sorted(ids) == [*range(num_samples)] for ids in trained.values())
    ends = [json.loads((out / f"end-{rank}.json").read_text()) for rank in left]
    for weights, calls, *_ in ends:
        assert weights == ends[0][0]
        assert calls[-1][0] == ends[0][1][-1][0]
    for parameter, values in zip(model.parameters(), ends[0][0], strict=True):
        assert parameter.flatten().tolist() == pytest.approx(values, rel=1e-9, abs=1e-12)
    met: list[list[Any]] = ends[0][1]
    return met


def kills(place: str, time: int, rank: int) -> Faults:
    return {str(rank): ["kill", place, time]}


@pytest.mark.multirank
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "faults",
    [
        kills("averaged", 4, 0), kills("epoch end", 1, 2), kills("forward", 9, 1),
        *(
            pytest.param(kills(place, time, time % 3), marks=pytest.mark.nightly)
            for place in PLACES for time in (1, 2, 3, 8, 17, 24)
            if time < 3 or place not in ("kept", "epoch", "epoch end")
        ),
    ],
    ids=lambda faults: "-".join(map(str, [*faults, *next(iter(faults.values()))])),
)  # fmt: skip
def test_those_that_are_left_train_each_sample_once_as_one_process_would(tmp_path, faults):
    ((lost, (_, place, time)),) = faults.items()
    left = [rank for rank in range(3) if rank != int(lost)]
    statuses = run(tmp_path, 3, faults)
    assert [statuses[rank] for rank in left] == [0, 0], "\n".join(said(tmp_path, r) for r in left)
    if place in ("kept", "epoch") and time > 1 + (place == "epoch") * (EPOCHS - 1):
        return  # it never came there
    calls = check(tmp_path, 3, left=left)
    if statuses[int(lost)] == -9:
        assert calls[-1][0] == left
    assert not [*(tmp_path / "live").iterdir()]


@pytest.mark.multirank
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("faults", "left"),
    [
        ({"1": ["kill", "forward", 6], "0": ["kill", "kept", 2]}, [2, 3]),
        # As torchrun ends the other ranks of a node: they came to the meeting before.
        ({"1": ["kill", "forward", 6], "0": ["soon", "forward", 6]}, [2, 3]),
        pytest.param(
            {"1": ["kill", "forward", 6], "2": ["kill", "forward", 6]}, [0, 3],
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"1": ["kill", "forward", 6], "2": ["kill", "averaged", 12], "3": ["kill", "epoch", 3]},
            [0], marks=pytest.mark.nightly,
        ),
    ],
)  # fmt: skip
def test_more_may_be_lost_at_once_and_while_the_others_go_on(tmp_path, faults, left):
    statuses = run(tmp_path, 4, faults)
    assert [statuses[rank] for rank in left] == [0] * len(left), said(tmp_path, left[0])
    assert check(tmp_path, 4, left=left)[-1][0] == left


@pytest.mark.multirank
@pytest.mark.timeout(240)
def test_a_rank_that_lacks_the_sum_takes_over_what_the_others_have(tmp_path):
    assert run(tmp_path, 3, {"1": ["miss", "averaged", 9]}) == [0, 0, 0], said(tmp_path, 1)
    assert check(tmp_path, 3, left=[0, 1, 2])[-1] == [[0, 1, 2], 9]
    assert "go on from step 8" in said(tmp_path, 1), "it had not taken the step"


@pytest.mark.multirank
@pytest.mark.timeout(240)
@pytest.mark.parametrize("place", ["forward", pytest.param("epoch", marks=pytest.mark.nightly)])
def test_a_policy_goes_on(tmp_path, place):
    faults = {"1": ["kill", place, 10 if place == "forward" else 2], "2": ["call", "stepped", 14]}
    assert run(tmp_path, 3, faults, scores=True, units=[1]) == [0, -9, 0, 0]
    assert check(tmp_path, 4, left=[0, 2, 3])[-1][0] == [0, 2, 3]


@pytest.mark.multirank
@pytest.mark.timeout(240)
@pytest.mark.parametrize("copies", [2, pytest.param(1, marks=pytest.mark.nightly)])
def test_the_rows_of_a_lost_node_come_from_their_copies_also_under_ddp(tmp_path, copies):
    statuses = run(tmp_path, 3, kills("forward", 9, 1), wrapped=True, copies=copies)
    assert statuses == [0, -9, 0], said(tmp_path, 0)
    assert check(tmp_path, 3, left=[0, 2])[-1] == [[0, 2], 8]
    read = sum(json.loads((tmp_path / f"end-{rank}.json").read_text())[2] for rank in (0, 2))
    assert read == 0 if copies == 2 else read > 0


@pytest.mark.multirank
@pytest.mark.timeout(240)
def test_a_rank_that_stands_still_is_left_behind_and_told_so(tmp_path):
    statuses = run(tmp_path, 3, {"1": ["stop", "forward", 5]}, timeout_s=8.0)
    assert statuses == [0, 1, 0], said(tmp_path, 0)
    assert check(tmp_path, 3, left=[0, 2])[-1] == [[0, 2], 4]
    assert "the others have ended without this rank" in said(tmp_path, 1)


@pytest.mark.multirank
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("faults", "units", "calls"),
    [
        ({"0": ["call", "forward", 9]}, [2], [[0, 1], [0, 1, 2, 3]]),
        # One that has come is lost, and comes again.
        pytest.param(
            {"0": ["call", "batch", 5], "2": ["kill", "forward", 3], "1": ["call", "kept", 3]},
            [1, 1], [[0, 1], [0, 1, 2], [0, 1], [0, 1, 3]], marks=pytest.mark.nightly,
        ),
        # Before it is there another is lost; it is lost before it has what the others have.
        pytest.param(
            {"0": ["call", "averaged", 6], "1": ["kill", "averaged", 6]}, [1], [[0, 1], [0, 2]],
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"0": ["call", "batch", 5], "2": ["kill", "kept", 1]}, [1],
            [[0, 1], [0, 1, 2], [0, 1]], marks=pytest.mark.nightly,
        ),
    ],
)  # fmt: skip
def test_ranks_that_come_join_at_a_step_and_each_sample_is_trained_once(
    tmp_path, faults, units, calls
):
    statuses = run(tmp_path, 2, faults, units=units)
    left = calls[-1]
    assert [statuses[rank] for rank in left] == [0] * len(left), said(tmp_path, left[-1])
    assert [ranks for ranks, _ in check(tmp_path, len(statuses), left=left)] == calls
    assert not [*(tmp_path / "live").iterdir()]


@pytest.mark.multirank
@pytest.mark.timeout(240)
@pytest.mark.parametrize("place", ["forward", pytest.param("stepped", marks=pytest.mark.nightly)])
def test_a_rank_that_is_asked_leaves_with_its_step_and_nobody_waits_for_it(tmp_path, place):
    statuses = run(tmp_path, 3, {"1": ["ask", place, 9]}, patience_s=100.0)
    assert statuses == [0, 0, 0], said(tmp_path, 0)
    (_, first), (ranks, number) = check(tmp_path, 3, left=[0, 2])
    assert (first, ranks) == (0, [0, 2])
    assert number in ((8, 9) if place == "forward" else (9, 10))
    assert "ranks [1] have left" in said(tmp_path, 0)


@pytest.mark.multirank
@pytest.mark.timeout(240)
def test_all_ranks_may_be_asked_to_leave(tmp_path):
    faults = {str(rank): ["ask", "forward", 9] for rank in range(2)}
    assert run(tmp_path, 2, faults) == [0, 0], said(tmp_path, 0)
    assert not [*(tmp_path / "live").iterdir()]
    assert not [*tmp_path.glob("end-*")]


@pytest.mark.multirank
@pytest.mark.timeout(240)
def test_an_error_of_ones_own_and_too_few_ranks_end_the_job(tmp_path):
    (tmp_path / "own").mkdir()
    assert run(tmp_path / "own", 2, {"1": ["raise", "forward", 5]}) == [1, 1]
    assert "rank 1 failed: ValueError: planted; the job ends" in said(tmp_path / "own", 0)
    (tmp_path / "few").mkdir()
    assert run(tmp_path / "few", 2, kills("batch", 5, 0), least=2) == [-9, 1]
    assert "1 ranks are left, expected 2 at least" in said(tmp_path / "few", 1)


def test_what_cannot_go_on_is_refused(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(WorldError, match="expected by what lets the others live on"):
        dataio.live(lambda job: None, directory=tmp_path)
    with pytest.raises(StateError, match=r"no job runs in .*; start it without TONARI_LIVE_JOIN"):
        find_job(tmp_path)
    job = dataio.LiveJob(single_world(), (0,), None)
    with pytest.raises(WorldError, match=r"call job\.keep"), job.step():
        pass


@pytest.mark.parametrize("importance", [None, InfoBatch(0.5, delta=1.0)])
@pytest.mark.parametrize(("steps", "num_trained"), [(6, 12), (6, 4), (None, 12)])
def test_a_mixture_goes_on_behind_the_last_step_where_its_steps_are_given(
    tmp_path, steps, num_trained, importance
):
    counted, remembered, trained = None, list[Any](), list[tuple[str, int]]()
    for call in range(2):
        loaders = {
            name: dataio.Loader(
                MemorySource(12), batch_size=4, fields=FIELDS, cache=tmp_path / name,
                world=single_world(), reports=dataio.Reports(progress=False), importance=importance,
            )
            for name in "ab"
        }  # fmt: skip
        job = dataio.LiveJob(single_world(), (0,), counted, remembered=remembered)
        with dataio.Mixture(loaders, {"a": 1.0, "b": 1.0}, steps=steps) as mixture:
            if steps is None:
                with pytest.raises(
                    WorldError, match=r"the steps of a lap, .* give a Mixture steps"
                ):
                    job.keep(mixture)
                return
            assert job.keep(mixture, model=torch.nn.Linear(1, 1)) == bool(call)
            for batch in mixture:
                mixture.report(batch, torch.ones(4))
                if len(trained) == num_trained and not call:
                    break  # it does not count
                with job.step():
                    name = str(batch["dataset"])
                    trained += [(name, each) for each in batch["sample_id"].tolist()]
        counted, remembered = job.counted, job.remembered
    assert sorted(trained) == [(name, sample_id) for name in "ab" for sample_id in range(12)]


def test_a_connection_to_a_node_without_power_ends_by_itself():
    sockets = Sockets()
    with socket.create_server(("127.0.0.1", 0)) as server, sockets.noting():
        client = socket.create_connection(server.getsockname())
    assert client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 15_000
    sockets.shut()
    with client, pytest.raises(ConnectionError):
        client.send(b"shut")


@pytest.mark.parametrize("watched", [True, False])
def test_a_rank_sees_that_another_one_has_gone_where_connections_are_watched(watched):
    sockets = Sockets()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with sockets.noting(watched=watched):
            client = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        other.send(b"unread")
        assert not sockets.are_cut()
        other.close()
        assert sockets.are_cut() == watched
    sockets.shut()
    assert not sockets.are_cut()
    client.close()


def test_connections_that_are_shut_amid_steps_leave_nobody_waiting_in_gloo():
    took_s = []
    for number in range(25):
        sockets, store, limit = Sockets(), HashStore(), timedelta(seconds=10)
        groups = queue.Queue[ProcessGroupGloo]()

        def make(rank: int, *args: Any, groups: queue.Queue[ProcessGroupGloo] = groups) -> None:
            groups.put(ProcessGroupGloo(args[0], rank, 2, args[1]))

        def train(group: ProcessGroupGloo) -> None:
            with contextlib.suppress(RuntimeError):
                step = group.allgather  # type: ignore[attr-defined]
                while True:
                    step([[torch.empty(1), torch.empty(1)]], [torch.ones(1)]).wait()

        with sockets.noting(), ThreadPoolExecutor(2) as makers:
            assert not any(makers.map(make, (0, 1), [store] * 2, [limit] * 2))
        with ThreadPoolExecutor(2) as ranks:
            for _ in range(2):
                ranks.submit(train, groups.get())
            time.sleep(0.02 + number * 3e-4)
            shut_s = time.monotonic()
            sockets.shut()
        took_s.append(time.monotonic() - shut_s)
    assert max(took_s) < 5, f"a rank waited until the group's timeout: {took_s}"


def test_a_state_is_told_to_others_as_it_is():
    model = torch.nn.BatchNorm1d(3).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.5, 0.9))
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    state: dict[str, Any] = {
        "a": model.state_dict(),
        "b": optimizer.state_dict(),
        "c": [None, True, 1.5, {3: ()}],
    }
    sent: list[torch.Tensor] = []
    received: list[torch.Tensor] = []
    found = restore(json.loads(json.dumps(describe(state, sent))), received)
    assert len(sent) == len(received) > 8
    for one, other in zip(received, sent, strict=True):
        assert one.view(-1).view(torch.uint8).shape == other.view(-1).view(torch.uint8).shape
        one.copy_(other)
    torch.testing.assert_close(found["a"], dict(state["a"]), rtol=0, atol=0)
    assert str(found["b"]) == str(state["b"])
    assert found["c"] == state["c"]
    with pytest.raises(WorldError, match="expected tensors, numbers, text"):
        describe({"a": {1, 2}}, [])


def test_what_a_rank_that_leaves_closes_ends_before_it_has_left(tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = {
        "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)
    }  # fmt: skip
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    here: list[int] = []

    def train(job: dataio.LiveJob) -> None:
        job.keep(NoRows(), model=torch.nn.Linear(1, 1))
        with contextlib.ExitStack() as opened:
            # Such as a tracker: who goes on writes where this does.
            opened.callback(lambda: here.append(len([*tmp_path.glob("live-*")])))
            os.kill(os.getpid(), signal.SIGTERM)
            with job.step():
                pass

    with pytest.raises(SystemExit) as ended:
        dataio.live(train, directory=tmp_path)
    assert (ended.value.code, here) == (0, [1])
    # All have left.
    assert not [*tmp_path.iterdir()]


class SameRanks:
    """In place of `Generations`: one rank that is never lost."""

    def __init__(self, *_: object, **__: object) -> None:
        self.ranks, self.why, self.sockets, self.failed = (0,), "", Sockets(), ""
        self.num_calls, self.num_began = 0, 1

    def first(self) -> dataio.World:
        return single_world()

    def go_on(self, why: str, *, least: int) -> dataio.World:
        self.num_calls += 1
        assert self.num_calls < 20, "it goes on for ever"
        return single_world()

    def are_lost(self, error: BaseException) -> bool:
        return "closed by peer" in str(error)

    def fail(self, error: BaseException, *, has_state: bool) -> None:
        self.failed = str(error)

    def end(self, world: dataio.World, result: Any) -> Any:
        return result

    def ask_to_leave(self) -> None: ...

    def leave_if_asked(self) -> None: ...

    def leave(self) -> None: ...

    def close(self) -> None: ...


class NoRows:
    """A loader that has none."""

    lost_with_ranks = ""

    def state_dict(self) -> dict[str, object]:
        return {}

    def remember(self) -> None: ...

    def count(self, state: dict[str, object]) -> None: ...

    def go_on(self, state: dict[str, object], remembered: Sequence[Any]) -> None: ...


@pytest.mark.parametrize("gets_on", [False, True])
def test_ranks_that_fail_again_and_again_at_one_step_and_are_not_lost_end(
    tmp_path, monkeypatch, gets_on
):
    monkeypatch.setattr(live_module, "Generations", SameRanks)
    calls: list[int] = []

    def train(job: dataio.LiveJob) -> str:
        calls.append(job.number)
        job.keep(NoRows(), model=torch.nn.Linear(1, 1))
        if gets_on or not job.number:
            with job.step():
                pass
        if gets_on and len(calls) == 12:
            return "done"
        raise RuntimeError("Connection closed by peer")

    if gets_on:
        assert dataio.live(train, directory=tmp_path) == "done"
        return
    with pytest.raises(WorldError, match=r"ranks \[0\] fail again and again behind step 1, and"):
        dataio.live(train, directory=tmp_path)
    assert calls == [0, *[1] * 5]


def test_nothing_holds_the_model_of_the_call_before(tmp_path, monkeypatch):
    monkeypatch.setattr(live_module, "Generations", SameRanks)
    models: list[weakref.ref[torch.nn.Module]] = []

    def train(job: dataio.LiveJob) -> None:
        model = torch.nn.Linear(1, 1)
        models.append(weakref.ref(model))
        job.keep(NoRows(), model=model)
        with job.step():
            pass
        if len(models) == 1:
            raise RuntimeError("Connection closed by peer")
        gc.collect()
        assert [each() for each in models] == [None, model]

    dataio.live(train, directory=tmp_path)


def test_who_lacks_a_step_takes_it_from_ranks_of_its_part_and_the_others_keep_their_own(
    monkeypatch,
):
    here = threading.local()
    sent: defaultdict[int, queue.Queue[tuple[int, torch.Tensor]]] = defaultdict(queue.Queue)
    generators: dict[int, torch.Tensor] = {}

    def recv(tensor: torch.Tensor, src: int) -> None:
        source, its = sent[here.rank].get(timeout=30)
        assert source == src
        tensor.copy_(its)

    def state_of(rank: int) -> torch.Tensor:
        return torch.Generator().manual_seed(rank).get_state()

    def run(world: dataio.World) -> list[float]:
        here.rank = world.rank
        before, after = torch.nn.BatchNorm1d(1), torch.nn.BatchNorm1d(1)
        assert before.running_mean is not None
        assert after.running_mean is not None
        before.running_mean.fill_(world.rank)
        values = {"model": [each.clone() for each in before.buffers()]}
        number = 4 + (world.rank < 2)
        counted = live_module.Counted(
            number, {}, state_of(world.rank), values, {"model": before}
        )  # fmt: skip
        job = dataio.LiveJob(world, (0, 1, 2, 3), counted)
        with pytest.raises(WorldError, match="no rank that is left has part 2 of the weights"):
            job.keep(NoRows(), part=world.rank, model=after)
        assert job.keep(NoRows(), part=world.rank % 2, model=after)
        return after.running_mean.tolist()

    monkeypatch.setattr(
        "torch.distributed.send", lambda its, dst: sent[dst].put((here.rank, its.clone()))
    )
    monkeypatch.setattr("torch.distributed.recv", recv)
    monkeypatch.setattr(
        torch, "set_rng_state", lambda state: generators.setdefault(here.rank, state)
    )
    # Ranks 2 and 3 lack the step.
    assert run_threads(thread_worlds([1] * 4), run) == [[0.0], [1.0], [0.0], [1.0]]
    assert [torch.equal(generators[rank], state_of(rank % 2)) for rank in range(4)] == [True] * 4


def test_what_wakes_up_a_loop_of_asyncio_is_no_connection():
    sockets = Sockets()
    with sockets.noting():
        loop = asyncio.new_event_loop()
        one, other = socket.socketpair()
    sockets.shut()
    loop.close()
    with one, other:
        one.send(b"still")
        assert other.recv(5) == b"still"


class Time:
    """A clock that sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def meeting(
    tmp_path: Path, rank: int, time: Time, unit: range | None = None, **asked: Any
) -> Meeting:
    return Meeting(
        tmp_path / "meeting", rank, patience_s=3.0, unit=unit, clock=time.clock, sleep=time.sleep,
        **asked,
    )  # fmt: skip


def test_a_meeting_waits_for_those_that_are_alive_and_not_longer(tmp_path):
    time = Time()
    first, second, third = (meeting(tmp_path, rank, time) for rank in range(3))
    assert not first.is_called
    first.announce()
    first.come()
    assert second.is_called
    second.come()
    # All that may come have: at once.
    assert first.agree([0, 1], timeout_s=60) == (0, 1)
    assert time.now == 0
    third.come()
    with pytest.raises(WorldError, match="the others go on without this rank"):
        third.agree([0, 1, 2], timeout_s=60)


@pytest.mark.parametrize("is_alive", [False, True])
def test_a_meeting_that_misses_ranks_has_patience_and_more_for_those_that_are_alive(
    tmp_path, is_alive
):
    time = Time()
    second, third = (meeting(tmp_path, rank, time) for rank in (1, 2))
    if is_alive:
        third.announce()
    second.announce()
    second.come()
    assert second.agree([0, 1, 2], timeout_s=60) == (1,)
    assert time.now == pytest.approx(63 if is_alive else 3, abs=0.1)


@pytest.mark.parametrize("is_one_lost", [False, True])
def test_a_meeting_does_not_wait_for_those_that_have_left(tmp_path, is_one_lost):
    time = Time()
    first, second = (meeting(tmp_path, rank, time) for rank in (0, 1))
    first.announce()
    assert first.leave() == {0}
    second.announce()
    assert second.agree([0, 1, 2] if is_one_lost else [0, 1], timeout_s=60) == (1,)
    assert time.now == pytest.approx(3 if is_one_lost else 0, abs=0.1)


@pytest.mark.parametrize(
    ("asked", "met"),
    [
        ("001", (0, 1)), ("011", (0, 1, 2)), ("111", (0, 1, 2)),
        # The last one is a newcomer, which has no weights.
        ("0010", (0, 1, 3)), ("0110", (0, 1, 2, 3)), ("1110", (0, 1, 2, 3)),
    ],
)  # fmt: skip
def test_ranks_that_were_asked_leave_where_those_that_were_not_are_enough(
    tmp_path, monkeypatch, asked, met
):
    time, units = Time(), {3: range(3, 4)}
    ranks = [
        meeting(
            tmp_path,
            rank,
            time,
            units.get(rank),
            asked=lambda rank=rank: asked[rank] == "1",
            are_enough=lambda ranks: len(ranks) > 1,
        )
        for rank in range(len(asked))
    ]

    def sleep(seconds: float) -> None:
        time.now += seconds
        for each in ranks:
            each.come()

    ranks[0].announce()
    sleep(0.0)
    monkeypatch.setattr(ranks[1], "_sleep", sleep)
    assert ranks[1].agree([0, 1, 2], timeout_s=60) == met
    # If some alone were asked, the signal may still be on its way to the others.
    assert time.now == pytest.approx(0 if asked == "111" else 4, abs=0.1)


def test_a_rank_that_waited_for_the_others_as_long_as_it_may_is_not_too_late(tmp_path, monkeypatch):
    time = Time()
    first, second = (meeting(tmp_path, rank, time) for rank in (0, 1))
    first.announce()

    def sleep(seconds: float) -> None:
        time.now += seconds
        if time.now > 60.5:
            first.come()

    monkeypatch.setattr(second, "_sleep", sleep)
    assert second.agree([0, 1], timeout_s=60) == (0, 1)


@pytest.mark.parametrize("num_come", [1, 2])
def test_newcomers_are_awaited_and_listed_all_or_none(tmp_path, num_come):
    time = Time()
    for rank in range(1, 1 + num_come):
        meeting(tmp_path, rank, time, unit=range(1, 3)).come()
    member = meeting(tmp_path, 0, time)
    assert member.agree([0], timeout_s=60) == ((0, 1, 2) if num_come == 2 else (0,))
    assert time.now == pytest.approx(0 if num_come == 2 else 3, abs=0.1)


def test_newcomers_do_not_go_on_without_the_job(tmp_path):
    time = Time()
    with pytest.raises(WorldError, match=r"no rank of the job has come .* start it without"):
        meeting(tmp_path, 1, time).agree([0], timeout_s=60)
    assert time.now == pytest.approx(63, abs=0.1)


def test_newcomers_wait_for_ranks_that_connect_for_longer_than_they_have_patience(
    tmp_path, monkeypatch
):
    time = Time()
    newcomer, member = (meeting(tmp_path, rank, time) for rank in (1, 0))

    def sleep(seconds: float) -> None:
        time.now += seconds
        if time.now > 20.0:
            member.agree([0], timeout_s=60)

    monkeypatch.setattr(newcomer, "_sleep", sleep)
    assert newcomer.agree([0], timeout_s=60) == (0, 1)
    assert time.now == pytest.approx(20, abs=0.1)


def test_a_rank_that_came_and_says_nothing_more_is_not_on_the_list(tmp_path):
    time = Time()
    gone, second = (meeting(tmp_path, rank, time) for rank in (0, 1))
    for each in (gone, second):
        each.announce()
        each.come()
    assert second.agree([0, 1, 2], timeout_s=60) == (1,)
    assert time.now == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize("stalls_s", [0.0, 20.0])
def test_nobody_is_lost_because_the_directory_stands_still_for_all(tmp_path, monkeypatch, stalls_s):
    time = Time()
    first, second, third = (meeting(tmp_path, rank, time) for rank in range(3))
    for each in (first, second):
        each.announce()
        each.come()

    def write_late(path: Path, data: bytes) -> None:
        if path.name == "rank-1" and 1.0 < time.now < 20.0:
            time.now += stalls_s
        write_file(path, data)

    def sleep(seconds: float) -> None:
        time.now += seconds
        first.come()
        if time.now > stalls_s + 1.5:
            third.come()

    monkeypatch.setattr(meeting_module, "write_file", write_late)
    monkeypatch.setattr(second, "_sleep", sleep)
    assert second.agree([0, 1, 2], timeout_s=60) == (0, 1, 2)
    assert time.now == pytest.approx(stalls_s + 1.5, abs=0.6)


def test_a_list_that_a_node_sees_late_is_looked_for_now_and_then(tmp_path, monkeypatch):
    time, num_reads = Time(), 0
    first, second = (meeting(tmp_path, rank, time) for rank in (0, 1))
    for each in (first, second):
        each.announce()
        each.come()
    assert first.agree([0, 1], timeout_s=60) == (0, 1)
    read = second.read

    def read_late() -> list[int] | None:
        nonlocal num_reads
        num_reads += 1
        assert num_reads < 100, "it reads without a pause"
        return read() if time.now >= 1.0 else None

    monkeypatch.setattr(second, "read", read_late)
    assert second.agree([0, 1], timeout_s=60) == (0, 1)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOENT])
def test_a_file_that_is_replaced_as_it_is_read_is_read_again(tmp_path, monkeypatch, number):
    time, reads = Time(), [number, number]
    first, second = (meeting(tmp_path, rank, time) for rank in (0, 1))
    for each in (first, second):
        each.announce()
        each.come()
    read_bytes = Path.read_bytes

    def replaced(path: Path) -> bytes:
        if path.name == "rank-0" and reads:
            raise OSError(reads.pop(), "replaced")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", replaced)
    assert second.agree([0, 1], timeout_s=60) == (0, 1)
    assert not reads


def test_ranks_that_come_apart_have_one_list(tmp_path):
    met: dict[int, tuple[int, ...]] = {}
    meetings = [Meeting(tmp_path / "meeting", rank, patience_s=0.5) for rank in (0, 1)]
    for each in meetings:
        each.announce()
        each.come()

    def agree(rank: int) -> None:
        met[rank] = meetings[rank].agree([0, 1, 2], timeout_s=60)

    threads = [threading.Thread(target=agree, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert met == {0: (0, 1), 1: (0, 1)}

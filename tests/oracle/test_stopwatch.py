"""A step that is timed with nobody at the other end is the step that was traced."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.oracle.test_trace import MESHES, load, thorough_but_one
from tonari.oracle import Message, trace_step
from tonari.oracle.clock import HostClock
from tonari.oracle.errors import OracleError
from tonari.oracle.probe.probe import as_fast_as, load_probe, probe, save_probe
from tonari.oracle.programs import moved, programs
from tonari.oracle.record import Wait, Watcher
from tonari.oracle.stopwatch import Stopwatch, Timed, time_step
from tonari.oracle.trace import NoReports, make_batch
from tonari.trainer.run.build import build_rank, lay_out
from tonari.trainer.run.optimizers import build_optimizer
from tonari.trainer.run.own import Own
from tonari.trainer.run.step import train_step


def sent(events):
    return [event for event in events if isinstance(event, Message | Wait)]


@pytest.mark.parametrize("mesh", thorough_but_one(MESHES))
def test_messages_and_waits_of_a_timed_step_are_those_of_the_trace(tmp_path, mesh):
    world_size, overrides = MESHES[mesh]
    config = load(tmp_path, *overrides)
    for rank in {0, world_size - 1}:
        traced = trace_step(config, world_size=world_size, rank=rank)
        timed = time_step(config, world_size=world_size, rank=rank, steps=1)
        assert list(timed.events) == sent(traced.events)
        assert [len(lap) for lap in timed.laps_s] == [len(timed.events) + 1]
        assert 0 < timed.computing_s <= timed.step_s[0] * (1 + 1e-9)
    assert not dist.is_initialized()


@pytest.mark.parametrize("mesh", thorough_but_one(mesh for mesh in MESHES if MESHES[mesh][0] == 4))
def test_another_rank_at_a_coordinate_of_pp_does_the_same_with_its_own_peers(tmp_path, mesh):
    world_size, overrides = MESHES[mesh]
    config = load(tmp_path, *overrides)
    sizes = lay_out(config, world_size).sizes
    for rank in range(world_size):
        first = rank // (world_size // sizes[0]) * (world_size // sizes[0])
        timed = time_step(config, world_size=world_size, rank=first, steps=1)
        own = trace_step(config, world_size=world_size, rank=rank)
        assert list(moved(timed, rank, sizes).events) == sent(own.events)


def test_a_probe_alone_times_a_job_of_several_ranks_and_is_kept(tmp_path):
    config = load(tmp_path, "mesh.pp=2", "mesh.microbatches=2", "mesh.dp_shard=2")
    found = probe(config, world_size=4, steps=1, sizes=())
    assert found.ranks == 1
    assert [timed.rank for timed in found.steps] == [0, 2]
    save_probe(found, tmp_path / "probe.json")
    assert load_probe(tmp_path / "probe.json") == found
    assert [program.rank for program in programs(found.steps, 4, (2, 1, 2, 1, 1))] == [0, 1, 2, 3]


def test_a_probe_of_another_torch_is_refused(tmp_path):
    found = probe(load(tmp_path), world_size=1, steps=1, sizes=())
    path = tmp_path / "probe.json"
    save_probe(found, path)
    path.write_text(path.read_text().replace(found.torch, "1.0"))
    with pytest.raises(OracleError, match=r"probe of torch 1\.0, and this is"):
        load_probe(path)


@pytest.mark.parametrize("text", ["", "{}", '{"format": 2, "torch": 3}', "[1]"])
def test_what_is_no_probe_is_refused(tmp_path, text):
    path = tmp_path / "probe.json"
    path.write_text(text)
    with pytest.raises(OracleError, match="not a probe of this version"):
        load_probe(path)


def test_issuing_a_message_is_computation_and_what_a_peer_would_send_is_not(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now_s[0])

    def lasts(seconds):
        now_s[0] += seconds

    class Received:
        def is_floating_point(self):
            return True

        def fill_(self, _):
            lasts(7.0)

    def receive():
        monkeypatch.setattr(Watcher, "call", lambda *_: lasts(0.5))
        clock.call(torch.ops.c10d.recv_.default, ([Received()],), {})

    clock = Stopwatch(HostClock())
    clock.mark()
    lasts(1.0)
    clock.exchange(lambda: lasts(5.0), lambda _: clock.events.append(Wait(0)))
    lasts(2.0)
    # What turns out to be no message of ours is computation
    clock.exchange(lambda: lasts(4.0), lambda _: None)
    clock.exchange(receive, lambda _: clock.events.append(Wait(1)))
    assert clock.stop() == [6.0, 6.5, 0.0]
    clock.mark()
    lasts(3.0)
    assert clock.stop() == [3.0]


def test_ranks_with_company_lend_their_spread_and_not_their_pace():
    alone = Timed(rank=0, events=(Wait(0),), laps_s=((1.0, 1.0),), step_s=(2.0,))
    beside = Timed(rank=4, events=(), laps_s=((1.0, 3.0), (2.0, 2.0), (4.0, 2.0)), step_s=(9.0,))
    found = as_fast_as(alone, beside)
    assert (found.rank, found.events, found.computing_s) == (0, (Wait(0),), 2.0)
    assert found.laps_s == ((0.5, 1.5), (1.0, 1.0), (2.0, 1.0))


def test_a_step_is_timed_after_a_job_of_the_same_mesh(tmp_path):
    config = load(tmp_path, "mesh.dp_shard=2", "mesh.dp_replicate=2")
    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    try:
        parallel = build_rank(
            config, rank=3, world_size=4, device=torch.device("cpu"), own=Own()
        )  # fmt: skip
        pipeline = parallel.pipeline
        optimizer = build_optimizer(config.optimizer, pipeline.parameters())
        batch = make_batch(config, Own(), parallel.task, pipeline.place)
        train_step(pipeline, optimizer, NoReports(), [batch], clip=1.0)
        # Groups are numbered from one again in the next world
        dist.new_group([0, 1, 2, 3])
    finally:
        dist.destroy_process_group()
    timed = time_step(config, world_size=4, rank=0, steps=1)
    traced = trace_step(config, world_size=4, rank=0)
    assert list(timed.events) == sent(traced.events)

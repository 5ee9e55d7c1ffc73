"""A job on a GPU is probed by the GPU's own events, and planned: on a card that is made up."""

import json
import re
from collections import deque
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.oracle.test_trace import GPT, load
from tonari.cli import main
from tonari.oracle import clock, stopwatch
from tonari.oracle.clock import DeviceClock, Gpu
from tonari.oracle.errors import OracleError
from tonari.oracle.plan import plan_step
from tonari.oracle.probe import probe
from tonari.oracle.record import Message, Watcher
from tonari.oracle.stopwatch import time_step
from tonari.trainer.run.step import train_step

QUEUED = 1000
"""Kernels that a card takes in before its host waits."""
CYCLES_PER_S = 2e9
WATCHED_S = 3e-5
"""What a clock on the host costs at each operator."""


class Card(ModuleType):
    """Stands in for ``torch.cuda``: kernels run in their order, none before it is issued."""

    def __init__(self, *, issuing_s: float, kernel_s: float, byte_s: float = 0.0) -> None:
        super().__init__("card")
        self.issuing_s, self.kernel_s, self.byte_s = issuing_s, kernel_s, byte_s
        self.now_s = self.idle_from_s = self.kernels_s = 0.0
        self.operators = 0
        self._ends_s: deque[float] = deque()

    def issue(self, kernel_s: float) -> None:
        self.now_s += self.issuing_s
        self.operators += 1
        self.kernels_s += kernel_s
        self.take(kernel_s)

    def take(self, kernel_s: float) -> None:
        while self._ends_s and self._ends_s[0] <= self.now_s:
            self._ends_s.popleft()
        if len(self._ends_s) == QUEUED:
            self.now_s = self._ends_s.popleft()
        self.idle_from_s = max(self.idle_from_s, self.now_s) + kernel_s
        self._ends_s.append(self.idle_from_s)

    def Event(self, *, enable_timing):
        assert enable_timing
        return Mark(self)

    def current_stream(self):
        return "compute"

    def stream(self, stream):
        assert stream == "compute"
        return nullcontext()

    def synchronize(self):
        self.now_s = max(self.now_s, self.idle_from_s)


class Mark:
    def __init__(self, card):
        self.card, self.at_s = card, None

    def record(self, stream):
        assert stream == "compute"
        self.at_s = max(self.card.now_s, self.card.idle_from_s)

    def query(self):
        return self.at_s <= self.card.now_s

    def elapsed_time(self, end):
        assert not end.at_s > self.card.now_s, "read before the card came to it"
        return (end.at_s - self.at_s) * 1000


class Issuing(TorchDispatchMode):
    """Lets each operator take the host and the card what a script says."""

    def __init__(self, card):
        super().__init__()
        self.card = card

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "aten":
            kernel_s = self.card.kernel_s * (3 if func is torch.ops.aten.mm.default else 1)
            is_copied = func is torch.ops.aten.copy_.default and self.card.byte_s
            self.card.issue(args[1].nbytes * self.card.byte_s if is_copied else kernel_s)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def stands_in(monkeypatch):
    """Let a card stand in for a GPU; each step adds its operators and its kernels' time to a list.

    Both are what the script says, however the step was timed.
    """

    def stand_in(card):
        steps = []

        def scripted(*args, **named):
            before = card.operators, card.kernels_s
            found = train_step(*args, **named)
            steps.append((card.operators - before[0], card.kernels_s - before[1]))
            return found

        def watched(*args):
            card.now_s += WATCHED_S
            return call(*args)

        call = Watcher.call
        monkeypatch.setattr(Watcher, "call", watched)
        monkeypatch.setattr(stopwatch, "train_step", scripted)
        monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: card.now_s))
        monkeypatch.setattr(clock, "occupy", lambda cycles: card.take(cycles / CYCLES_PER_S))
        return Gpu(torch.device("cpu"), "a made-up card", card), steps

    return stand_in


@pytest.fixture
def planned(tmp_path, monkeypatch, capsys, stands_in):
    """Probe a job on a card, and plan it: the plan, what was said, a step as it was scripted."""

    def run(card):
        path, kept, sent_on = tmp_path / "run.toml", tmp_path / "probe.json", []

        def send(*, device, **_):
            sent_on.append(device)
            return ()

        path.write_text(GPT)
        gpu, steps = stands_in(card)
        monkeypatch.setattr(probe, "find_gpu", lambda *_: gpu)
        monkeypatch.setattr(probe, "probe_messages", send)
        command = [str(path), "run.device=cuda"]
        with Issuing(card):
            assert main(["probe", *command, "--steps", "2", "--no-data", "--out", str(kept)]) == 0
        assert set(sent_on) == {"cuda"}
        monkeypatch.undo()
        command = ["plan", *command, "--probe", str(kept)]
        assert main([*command, "--json"]) == 0
        found = capsys.readouterr().out
        said, _, document = found.partition("{")
        assert main([*command, "--explain"]) == 0
        return json.loads("{" + document), said + capsys.readouterr().out, steps[-1]

    return run


def test_a_step_takes_what_its_kernels_do_where_the_host_is_faster(planned):
    document, shown, (operators, kernels_s) = planned(Card(issuing_s=1e-5, kernel_s=1e-3))
    assert operators > 200
    assert document["step_s"] == pytest.approx(kernels_s)
    assert document["parts_s"]["compute"] == pytest.approx(kernels_s)
    assert document["parts_s"].get("issuing", 0.0) < 0.01 * kernels_s
    assert "a made-up card: so long do kernels take" in shown
    assert "a made-up card: what its allocator and libraries keep beside" in shown


def test_a_step_takes_what_its_host_does_where_that_is_slower(planned):
    # A hundred operators take longer than the card is held back at first
    card = Card(issuing_s=2e-4, kernel_s=5e-5)
    document, shown, (operators, kernels_s) = planned(card)
    assert document["step_s"] == pytest.approx(operators * 2e-4)
    assert document["parts_s"]["compute"] == pytest.approx(kernels_s)
    assert document["parts_s"]["issuing"] == pytest.approx(operators * 2e-4 - kernels_s, rel=0.01)
    assert "waiting: issuing" in shown
    assert re.search(r"issuing +left out", shown)


def test_a_step_takes_what_its_copies_do_where_they_are_slower(planned):
    document, shown, (_, kernels_s) = planned(Card(issuing_s=1e-6, kernel_s=1e-6, byte_s=1e-3))
    # uint8[8, 16 + 1] tokens, float32[8] weights, int64[8] numbers and slots
    copy_s = 1e-3 * (8 * 17 + 8 * 4 + 2 * 8 * 8)
    assert document["step_s"] == pytest.approx(copy_s)
    assert document["parts_s"]["copy"] == pytest.approx(copy_s - kernels_s, rel=0.05)
    assert "waiting: copy" in shown


def test_laps_between_messages_are_those_of_the_card(tmp_path, stands_in):
    config = load(tmp_path, "mesh.pp=2", "mesh.microbatches=2")
    card = Card(issuing_s=1e-4, kernel_s=1e-3)
    gpu, steps = stands_in(card)
    with Issuing(card):
        timed = time_step(config, world_size=2, rank=0, steps=2, gpu=gpu)
    kinds = [event.kind for event in timed.events if isinstance(event, Message)]
    assert kinds.count("receive") == 2
    assert {len(lap) for lap in (*timed.laps_s, *timed.issuing_s)} == {len(timed.events) + 1}
    # What a peer would send is made up, by a kernel that no step has
    operators, kernels_s = steps[-1]
    assert timed.computing_s == pytest.approx(kernels_s - 2 * card.kernel_s)
    assert timed.core_s == pytest.approx((operators - 2) * card.issuing_s)
    assert all(step_s >= timed.computing_s for step_s in timed.step_s)


def test_a_step_that_waits_for_its_card_is_timed_all_the_same():
    card = Card(issuing_s=1e-5, kernel_s=1e-3)
    clock = DeviceClock(card, holds=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tonari.oracle.clock.occupy", lambda cycles: card.take(cycles / CYCLES_PER_S))
        shorter = True
        for _ in range(2):
            assert shorter
            clock.begin()
            card.issue(card.kernel_s)
            card.synchronize()
            card.issue(card.kernel_s)
            assert clock.end() == pytest.approx([2e-3 + card.issuing_s])
            shorter = clock.falls_short()
    assert not shorter


def test_a_gpu_that_is_not_here_is_refused_and_so_is_the_probe_of_another_device(tmp_path):
    on_gpu, on_host = load(tmp_path, "run.device=cuda"), load(tmp_path)
    with pytest.raises(OracleError, match="sees no GPU here"):
        probe.probe(on_gpu, world_size=1, sizes=())
    found = probe.probe(on_host, world_size=1, steps=1, sizes=())
    with pytest.raises(OracleError, match='is "cuda", and the probe is of steps on the host'):
        plan_step(on_gpu, found)
    assert plan_step(load(tmp_path, "run.device=auto"), found).step_s
    with pytest.raises(OracleError, match='is "cpu", and the probe is of steps on a card'):
        plan_step(on_host, replace(found, gpu="a card"))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch's own, as a group of one GPU meets
def test_a_card_is_probed_and_its_job_planned(tmp_path):
    path, kept = tmp_path / "run.toml", tmp_path / "probe.json"
    path.write_text(GPT)
    command = [str(path), "run.device=cuda"]
    assert main(["probe", *command, "--steps", "3", "--no-data", "--out", str(kept)]) == 0
    found = probe.load_probe(kept)
    assert found.gpu == torch.cuda.get_device_name()
    assert {"all_reduce", "all_gather"} <= {each.kind for each in found.messages}
    (timed,) = found.steps
    assert 0 < timed.computing_s <= 1.1 * max(timed.step_s)
    slowest_s = max(timed.computing_s, timed.core_s, timed.copy_s)
    planned = plan_step(load(tmp_path, "run.device=cuda"), found)
    assert planned.step_s == pytest.approx(slowest_s, rel=0.2)

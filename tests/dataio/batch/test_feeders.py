"""Where rows are made cannot be seen: neither in their bytes, nor in what is wrong with them."""

import contextlib
import math
import os
import platform
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import importance
from dataio import AsList, FieldError, Image, WorkerError, Workers
from dataio.base.network import listen
from dataio.batch.feeders import directory as found
from dataio.batch.feeders import offload, serve, wire
from dataio.batch.feeders.offload import Feeders, PartRows
from dataio.batch.feeders.parts import MadeRows
from dataio.job.sockets import Sockets
from dataio.world import single_world
from tests.dataio import test_pictures as pictures
from tests.dataio.batch.gather_pool import FIELDS, gathered, open_pool, pick_in_turn, pixels
from tests.dataio.batch.test_gather import assert_same
from tests.dataio.batch.test_process_transform import draw, fail, jitter
from tests.multirank import ROOT
from tests.opened import make_gather

LIMIT_S = 60.0
HERE: dict[str, Any] = {"num_threads": 2}


class OneCore:
    """A feeder of one core, in this process."""

    def __init__(self, directory: Path, *, makes: bool = True) -> None:
        found.check_directory(directory)
        self.core = serve._Core(secrets.token_bytes(32))
        self.listening = listen("127.0.0.1")
        self.port = self.listening.getsockname()[1]
        self.accepting = threading.Thread(target=self.accept, daemon=True)
        self.accepting.start()
        if makes:
            threading.Thread(target=self.core.make, daemon=True).start()
        path = found.announce(directory, "127.0.0.1", (self.port,), self.core._secret)
        self.path = path.rename(path.with_name(f"feeder-{self.port}.json"))

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            self.core.accept(self.listening)

    def end(self) -> None:
        self.path.unlink(missing_ok=True)
        # Closing alone does not wake up who accepts
        with contextlib.suppress(OSError):
            self.listening.shutdown(socket.SHUT_RDWR)
        self.accepting.join()
        self.listening.close()
        for trainer in [*self.core._trainers]:
            trainer.shut()


@contextlib.contextmanager
def processes(directory: Path, *, cores: int = 1) -> Iterator["subprocess.Popen[bytes]"]:
    """A feeder as the command starts it."""
    command = [sys.executable, "-m", "tonari", "feed", str(directory), "--cores", str(cores)]
    # Without the tests' own path: the rank that trains sends what it needs of them
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": ""}) as feeder:
        try:
            wait_for(lambda: [*directory.glob("feeder-*.json")])
            yield feeder
        finally:
            feeder.terminate()
            feeder.wait(LIMIT_S)


def wait_for(what: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def eager(monkeypatch) -> None:
    """Feeders take whatever they can, and those that were lost may come back soon."""
    monkeypatch.setattr(Feeders, "_pays", lambda self, link: True)
    monkeypatch.setattr(offload, "LOOK_S", 0.02)
    monkeypatch.setattr(offload, "RETRY_S", 0.05)
    monkeypatch.setattr(serve, "LOOK_S", 0.05)


@pytest.fixture
def only_feeders(monkeypatch) -> None:
    """This rank's own threads make nothing but what feeders have lost."""

    def run_next(self: Feeders) -> None:
        with self._changed:
            ours = [part for part in self._parts if part.is_ours]
            for part in ours:
                self._parts.remove(part)
            self._changed.notify_all()
        for part in ours:
            part.made_by(self.run_here)

    monkeypatch.setattr(Feeders, "_run_next", run_next)
    monkeypatch.setattr(Feeders, "_help", lambda self, awaited: None)


@pytest.fixture
def slow_here(monkeypatch) -> None:
    """This rank's own threads are slow, so that feeders have work."""
    run_here = Feeders.run_here

    def slow(self: Feeders, *part: Any) -> None:
        time.sleep(0.02)
        run_here(self, *part)

    monkeypatch.setattr(Feeders, "run_here", slow)


@pytest.fixture
def feeders(tmp_path: Path) -> Path:
    return tmp_path / "feeders"


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a feeder in processes of its own."""
    directory = tmp_path_factory.mktemp("elsewhere") / "feeders"
    with processes(directory, cores=2):
        yield directory


@pytest.fixture
def core(feeders: Path) -> Iterator[OneCore]:
    one = OneCore(feeders)
    yield one
    one.end()


def ragged(sample: Any, rng: np.random.Generator) -> Any:
    """Values of every kind that a transform may return."""
    return {
        "noise": rng.normal(size=3),
        "half": torch.full((2,), rng.random(), dtype=torch.bfloat16),
        "some": AsList(sample["ragged"] + 1),
        "text": sample["text"],
        "turned": sample["image"][:, ::-1],
    }


def picky(sample: Any, rng: object) -> Any:
    if sample["label"] == 3:
        raise FieldError("three is too many")
    return sample


def listed(samples: Any) -> Any:
    """A collate that keeps every byte."""
    return [
        {name: np.asarray(value).tobytes() for name, value in sample.items()} for sample in samples
    ]


KINDS: dict[str, dict[str, Any]] = {
    "every field": {},
    "transform": {"transform": jitter},
    "values of every kind": {"transform": ragged},
    "collate": {"collate": listed},
    "collate of transformed": {"collate": listed, "transform": jitter},
    "skipped": {"on_error": "skip"},
    "skipped by the transform": {"on_error": "skip", "transform": picky},
    "batch_transform": {"batch_transform": lambda batch, rng: batch | {"n": [rng.random()]}},
}


@pytest.mark.usefixtures("only_feeders")
@pytest.mark.parametrize("kind", KINDS)
def test_feeders_make_the_batches_that_threads_make(tmp_path, elsewhere, kind) -> None:
    broken = frozenset([3, 11] if "on_error" in KINDS[kind] else [])
    with open_pool(tmp_path, broken=broken) as pool:
        expected = gathered(pool, **HERE, **KINDS[kind])
        gather = make_gather(pool, FIELDS, **HERE, **KINDS[kind], feeders=elsewhere)
        with contextlib.closing(gather):
            fed = [*gather.batches(pick_in_turn(40), range(5), epoch=1)]
            assert gather.feeders is not None
            figures = gather.feeders.figures
    looked = 4 * 3 if "transform" in KINDS[kind] else 0
    assert figures["feeder_rows"] == 40 - looked
    assert figures["feeder_lost_parts"] == 0
    assert figures["feeder_received_bytes"] > 40 * 8
    if "collate" in kind:
        assert fed == expected
    else:
        assert_same(expected, fed)
        assert all(map(same_strides, expected, fed))


def same_strides(one: Any, other: Any) -> bool:
    return all(
        value.stride() == other[name].stride()
        for name, value in one.items()
        if isinstance(value, torch.Tensor)
    )


@pytest.mark.usefixtures("only_feeders")
def test_pictures_of_other_sizes_are_left_out_as_without_feeders(
    tmp_path, elsewhere, monkeypatch
) -> None:
    """Which size is the first that was seen is the rank's to say, not each feeder's."""
    # With a transform, a row is a part of its own
    options: dict[str, Any] = {**HERE, "on_error": "skip", "transform": jitter}
    fields = {"image": FIELDS["image"]}
    # The last row of each batch, which a feeder takes first
    others, cut = pick_in_turn(40)(0, 5).slots[:, -1], pixels

    def of_two_sizes(i: int) -> Any:
        return cut(i)[: 5 if i in others else 6]

    monkeypatch.setattr("tests.dataio.batch.gather_pool.pixels", of_two_sizes)
    with open_pool(tmp_path, fields) as pool:
        expected = gathered(pool, fields, **options)
        gather = make_gather(pool, fields, **options, feeders=elsewhere)
        with contextlib.closing(gather):
            assert_same(expected, [*gather.batches(pick_in_turn(40), range(5), epoch=1)])
            assert gather.feeders is not None
            assert (gather.feeders.rows, gather.feeders.lost_parts) == (40 - 12, 0)
    assert sum((batch["sample_id"] >= 0).sum() for batch in expected) == 35


@pytest.mark.usefixtures("only_feeders")
def test_pictures_are_cut_as_without_feeders(tmp_path, elsewhere) -> None:
    def taken(workers: Workers, **options: Any) -> tuple[Any, float]:
        with pictures.open_loader(
            single_world(), tmp_path / "cache", workers=workers, **options
        ) as loader:
            return pictures.taken(loader), loader.stats().get("feeder_rows", 0.0)

    weights = np.arange(pictures.NUM_SAMPLES) % 3 + 0.0
    twice = {"importance": importance.Weighted(weights, num_samples=92)}
    for options in ({}, twice):
        expected, _ = taken(Workers(threads=1), **options)
        fed, rows = taken(Workers(threads=1, feeders=elsewhere), **options)
        assert fed == expected
        assert rows >= 2 * pictures.NUM_SAMPLES


@pytest.mark.parametrize("pays", [True, False])
def test_pictures_alone_are_made_past_feeders_that_do_not_pay(
    tmp_path, monkeypatch, elsewhere, pays
) -> None:
    fields = {"image": Image("jpg", crop=pictures.CROP, flip=0.5)}
    put, sent = Feeders.put, list[int]()

    def note(self: Feeders, job: Any, *given: Any) -> None:
        sent.append(job.work.step)
        put(self, job, *given)

    monkeypatch.setattr(Feeders, "put", note)
    monkeypatch.setattr(Feeders, "_is_dear", property(lambda self: not pays))
    monkeypatch.setattr(Feeders, "_keeps_up", property(lambda self: False))
    monkeypatch.setattr("dataio.batch.feeders.offload.TRIED_ROWS", 0)

    def taken(workers: Workers) -> Any:
        with pictures.open_loader(
            single_world(), tmp_path / "cache", fields=fields, workers=workers
        ) as loader:
            there = loader._session.gather.feeders
            if there is not None:
                there._made_here.rows, there._try_at = 1, math.inf
                assert there.num_cores
            return [batch["image"].numpy().tobytes() for _ in loader.epochs(2) for batch in loader]

    assert taken(Workers(threads=1, feeders=elsewhere)) == taken(Workers(threads=0))
    assert bool(sent) == pays


@pytest.mark.usefixtures("slow_here")
def test_a_process_elsewhere_seeds_the_global_generators_as_the_loader_does(
    tmp_path, elsewhere
) -> None:
    with open_pool(tmp_path) as pool:
        expected = gathered(pool, **HERE, transform=draw)
        gather = make_gather(pool, FIELDS, **HERE, transform=draw, feeders=elsewhere)
        with contextlib.closing(gather):
            assert_same(expected, [*gather.batches(pick_in_turn(40), range(5), epoch=1)])
            assert gather.feeders is not None
            assert gather.feeders.rows > 0


def run_with_losses(tmp_path: Path, feeders: Path, *, num_losses: int) -> tuple[int, int]:
    """Epochs beside feeders that end and come, none of them at a planned place."""
    rng, lost, made, epoch = np.random.default_rng(7), 0, 0, 0
    with open_pool(tmp_path) as pool:
        gathers = [make_gather(pool, FIELDS, **HERE, transform=ragged, prefetch=1)]
        cores = [OneCore(feeders), OneCore(feeders)]
        gathers.append(
            make_gather(pool, FIELDS, **HERE, transform=ragged, prefetch=1, feeders=feeders)
        )
        with contextlib.ExitStack() as stack:
            for gather in gathers:
                stack.callback(gather.close)
            there = gathers[1].feeders
            assert there is not None
            while lost < num_losses:
                expected, fed = (
                    g.batches(pick_in_turn(40), range(5), epoch=epoch) for g in gathers
                )
                for step, (one, other) in enumerate(zip(expected, fed, strict=True)):
                    assert_same([one], [other])
                    if step in rng.integers(0, 5, 2):
                        lost += 1
                        cores.pop(int(rng.integers(len(cores)))).end()
                        cores.append(OneCore(feeders))
                epoch += 1
                wait_for(lambda: there.num_cores >= 2)
            made = there.rows
        for core in cores:
            core.end()
    return lost, made


@pytest.mark.usefixtures("slow_here")
def test_feeders_that_end_and_come_change_no_byte(tmp_path, feeders) -> None:
    lost, made = run_with_losses(tmp_path, feeders, num_losses=4)
    assert lost >= 4
    assert made > 0


@pytest.mark.nightly
@pytest.mark.usefixtures("slow_here")
def test_thirty_feeders_that_end_and_come_change_no_byte(tmp_path, feeders) -> None:
    run_with_losses(tmp_path, feeders, num_losses=30)


def test_feeders_stay_when_ranks_are_lost(tmp_path, elsewhere) -> None:
    """The trainer makes its loader while connections to other ranks are noted."""
    sockets = Sockets()
    with open_pool(tmp_path) as pool:
        with sockets.noting():
            gather = make_gather(pool, FIELDS, **HERE, feeders=elsewhere)
        with contextlib.closing(gather):
            assert gather.feeders is not None
            links = [*gather.feeders._links.values()]
            sockets.shut()
            assert [link.is_cut() for link in links] == [False, False]


@pytest.mark.parametrize("num", [2, pytest.param(10, marks=pytest.mark.nightly)])
@pytest.mark.usefixtures("slow_here")
def test_each_feeder_that_comes_amid_an_epoch_makes_rows_of_it(tmp_path, feeders, num) -> None:
    options: dict[str, Any] = {**HERE, "transform": ragged, "prefetch": 1}
    with open_pool(tmp_path) as pool, contextlib.ExitStack() as stack:
        gathers = [make_gather(pool, FIELDS, **options)]
        gathers.append(make_gather(pool, FIELDS, **options, feeders=feeders))
        for gather in gathers:
            stack.enter_context(contextlib.closing(gather))
        there = gathers[1].feeders
        assert there is not None
        for epoch in range(num):
            expected, fed = (g.batches(pick_in_turn(40), range(5), epoch=epoch) for g in gathers)
            batches, before = [next(fed)], there.rows
            assert there.num_cores == 0
            core = OneCore(feeders)
            stack.callback(core.end)
            wait_for(lambda: there.num_cores == 1)
            assert_same([*expected], [*batches, *fed])
            assert there.rows > before
            core.end()
            wait_for(lambda: there.num_cores == 0)


@pytest.mark.thorough
@pytest.mark.usefixtures("slow_here")
def test_killed_processes_cost_what_they_had(tmp_path, feeders, caplog) -> None:
    with open_pool(tmp_path) as pool, processes(feeders) as feeder:
        expected = gathered(pool, **HERE, transform=jitter)
        gather = make_gather(pool, FIELDS, **HERE, transform=jitter, feeders=feeders)
        with contextlib.closing(gather):
            assert gather.feeders is not None
            batches = gather.batches(pick_in_turn(40), range(5), epoch=1)
            fed = [next(batches)]
            os.kill(feeder.pid, signal.SIGKILL)
            assert_same(expected, [*fed, *batches])
            there = gather.feeders
            wait_for(lambda: there.num_cores == 0)
    assert caplog.text.count("tried again after") == 1


def test_the_file_of_a_killed_feeder_is_removed_by_the_next_on_its_node(feeders) -> None:
    found.check_directory(feeders)

    def announced(name: str, listening: socket.socket) -> Path:
        path = found.announce(feeders, "127.0.0.1", listening.getsockname()[1:], b"")
        return path.rename(path.with_name(f"feeder-{platform.node()}{name}.json"))

    with listen("127.0.0.1") as here:
        killed, of_another = announced("-1", here), announced("2-1", here)
    with listen("127.0.0.1") as here:
        assert {*feeders.iterdir()} == {killed, of_another}
        kept = [announced(name, here) for name in ("-2", "-3")]
        assert {*feeders.iterdir()} == {of_another, *kept}


def test_the_cores_of_a_feeder_that_is_away_are_tried_once_in_a_while(
    tmp_path, feeders, monkeypatch
) -> None:
    tried: list[int] = []

    def refuse(host: str, port: int, timeout_s: float) -> Any:
        tried.append(port)
        raise ConnectionRefusedError

    monkeypatch.setattr(offload, "connect_apart", refuse)
    monkeypatch.setattr(offload, "LOOK_S", LIMIT_S)
    monkeypatch.setattr(offload, "RETRY_S", LIMIT_S)
    found.check_directory(feeders)
    found.announce(feeders, "127.0.0.1", (1, 2, 3), b"")
    with open_pool(tmp_path) as pool:
        gather = make_gather(pool, FIELDS, **HERE, feeders=feeders)
        with contextlib.closing(gather):
            assert gather.feeders is not None
            gather.feeders._look()
            gather.feeders._retry_at.clear()
            gather.feeders._look()
    assert tried == [1, 1]


@pytest.mark.thorough
def test_a_feeder_ends_with_the_run(feeders) -> None:
    with processes(feeders) as feeder:
        found.end_run(feeders)
        assert feeder.wait(LIMIT_S) == 0
        assert [path.name for path in feeders.iterdir()] == [found.OVER]


@pytest.mark.parametrize("helps", [True, False])
@pytest.mark.usefixtures("slow_here")
def test_a_feeder_that_hangs_costs_what_it_had(
    tmp_path, feeders, monkeypatch, caplog, helps
) -> None:
    """While the loop waits, what it waits for is made here; else when the limit is over."""
    if not helps:
        monkeypatch.setattr(Feeders, "_help", lambda self, awaited: None)
        monkeypatch.setattr(offload, "FIRST_LIMIT_S", 0.3)
    monkeypatch.setattr(offload, "RETRY_S", 60.0)
    core = OneCore(feeders, makes=False)
    with open_pool(tmp_path) as pool:
        expected = gathered(pool, **HERE)
        gather = make_gather(pool, FIELDS, **HERE, feeders=feeders)
        with contextlib.closing(gather):
            assert gather.feeders is not None
            assert_same(expected, [*gather.batches(pick_in_turn(40), range(5), epoch=1)])
            assert 1 <= gather.feeders.lost_parts <= offload.CREDITS
            assert gather.feeders.num_cores == helps
            assert gather.feeders.rows == 0
    core.end()
    assert caplog.text.count("did not answer within 0.3 s") == 1 - helps


PAYS = Feeders._pays


@pytest.mark.parametrize(
    ("make_s", "trade_s", "step_s", "took_s", "pays"),
    [
        (2e-3, 2e-4, 1e-3, 0.02, True),
        (3e-5, 1e-5, 1e-5, 0.001, True),  # small pictures: sending costs a third
        (1e-4, 9e-5, 1e-5, 0.001, False),  # sending costs as much
        (2e-3, 2e-4, 0.3, 0.02, False),  # the threads keep up
        (2e-3, 2e-4, 1e-3, 1.0, False),  # it would be late
        (None, 2e-4, 1e-3, 1.0, True),  # nothing is known yet
    ],
)
def test_rows_go_where_that_saves_this_ranks_time(
    tmp_path, feeders, core, make_s, trade_s, step_s, took_s, pays
) -> None:
    with open_pool(tmp_path) as pool:
        gather = make_gather(pool, FIELDS, num_threads=1, feeders=feeders)
        with contextlib.closing(gather):
            there = gather.feeders
            assert there is not None
            (link,) = there._links.values()
            if make_s is not None:
                there._made_here.add(1000, 1000 * make_s, 1000 * make_s)
            there._made_there.add(1000, 1000 * trade_s)
            there._steps_s.append(step_s)
            there._batch_rows = 64
            link.took_s.append(took_s)
            link.try_at = there._try_at = time.monotonic() + LIMIT_S
            run: Any = None
            there._parts.extend(PartRows(run, 0, 32, run, 0) for _ in range(4))
            assert PAYS(there, link) == pays
            there._try_at = 0.0
            is_cheap = make_s is not None and trade_s > offload.WORTH * make_s
            assert PAYS(there, link) == (pays or is_cheap), "what it costs is looked at again"
            there._parts.clear()


def test_one_feeder_serves_its_trainers_in_turn(monkeypatch) -> None:
    core, order, done = serve._Core(b""), [], threading.Event()

    class Trainer:
        def __init__(self, name: str, num: int) -> None:
            self.todo = deque([(name, number) for number in range(num)])

        def answer(self, name: Any, number: Any) -> None:
            order.append(name)
            if len(order) == 6:
                done.set()

    core._trainers = [Trainer("one", 4), Trainer("two", 2)]  # type: ignore[list-item]
    threading.Thread(target=core.make, daemon=True).start()
    assert done.wait(LIMIT_S)
    assert order == ["one", "two", "one", "two", "one", "one"]


@pytest.mark.usefixtures("only_feeders")
def test_errors_are_those_without_feeders(tmp_path, feeders, core) -> None:
    with open_pool(tmp_path, broken=frozenset([3])) as pool:
        kinds: tuple[tuple[type[Exception], dict[str, Any]], ...] = (
            (FieldError, {}),
            (WorkerError, {"transform": fail, "on_error": "skip"}),
        )
        for kind, options in kinds:
            with pytest.raises(kind) as expected:
                gathered(pool, num_threads=1, **options)
            with pytest.raises(kind) as fed:
                gathered(pool, num_threads=1, feeders=feeders, prefetch=1, **options)
            assert str(fed.value) == str(expected.value)


class OfAModuleThatIsHere:
    def __reduce__(self) -> Any:
        return __import__, ("no_such_module",)

    def __call__(self, sample: Any, rng: object) -> Any:
        return sample


def test_a_feeder_that_would_make_other_bytes_is_refused(
    tmp_path, feeders, core, monkeypatch, caplog
) -> None:
    ours = found.versions()
    with open_pool(tmp_path) as pool:
        with pytest.raises(WorkerError, match=r"cannot find the transform.*'no_such_module'.*both"):
            gathered(pool, **HERE, feeders=feeders, transform=OfAModuleThatIsHere())
        monkeypatch.setattr(serve, "versions", lambda: ours | {found.CPU: "another"})
        with pytest.raises(WorkerError, match=r"instructions another.*ATEN_CPU_CAPABILITY"):
            gathered(pool, **HERE, feeders=feeders, transform=jitter)
        assert len(gathered(pool, **HERE, feeders=feeders)) == 5
        monkeypatch.setattr(serve, "versions", lambda: ours | {"numpy": "1.0"})
        with pytest.raises(
            WorkerError,
            match=rf"feeder on 127.0.0.1 \(feeder-{core.port}.json\): it has numpy 1.0, but this "
            rf"node {np.__version__}, expected the same.*environment",
        ):
            gathered(pool, **HERE, feeders=feeders)
        with monkeypatch.context() as here:
            here.setattr(serve, "send", lambda made, value: made.sendall(b"pickle" * 99))
            with pytest.raises(WorkerError, match=r"it sent what is no message .*or stop it"):
                gathered(pool, **HERE, feeders=feeders)
        # One that comes later is not worth the run
        core.end()
        gather = make_gather(pool, FIELDS, **HERE, feeders=feeders)
        late = OneCore(feeders)
        words = f"(feeder-{late.port}.json): it has numpy 1.0"
        wait_for(lambda: words in caplog.text)
        time.sleep(3 * offload.RETRY_S)
        assert caplog.text.count(words) == 1
        assert gather.feeders is not None
        assert gather.feeders.num_cores == 0
        gather.close()
        late.end()


class Own:
    """A value of a user's own class; all are the same."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Own

    __hash__ = None  # type: ignore[assignment]


def owned(sample: Any, rng: object) -> Any:
    return sample | {"own": Own()}


@pytest.mark.usefixtures("slow_here")
@pytest.mark.parametrize("options", [{}, {"collate": list}])
def test_rows_whose_values_have_no_plain_form_are_made_here(
    tmp_path, elsewhere, caplog, options
) -> None:
    with open_pool(tmp_path) as pool:
        gather = make_gather(
            pool, FIELDS, **HERE, **options, prefetch=1, transform=owned, feeders=elsewhere
        )
        with contextlib.closing(gather):
            batches: Any = gather.batches(pick_in_turn(40), range(5), epoch=1)
            for batch in batches:
                own = [row["own"] for row in batch] if options else batch["own"]
                assert own == [Own()] * 8
            there = gather.feeders
            assert there is not None
            wait_for(lambda: not there._looking.is_alive())
            assert there.rows == 0
    assert caplog.text.count("test_feeders.Own cannot be sent); the rows that it had are") == 1
    assert "here, and so are all others; let the transform return" in caplog.text


class Caught:
    """In place of a connection: what is sent."""

    def __init__(self) -> None:
        self.data = b""

    def sendmsg(self, views: list[memoryview]) -> int:
        self.data += b"".join(views)
        return sum(map(len, views))


FIELDS_ALONE: dict[str, Any] = {}
RAGGED, LISTED = {"transform": ragged}, {"collate": lambda samples: {"all": listed(samples)}}
OTHER_FORM = {"noise": ((4,), np.dtype(float))}
WRONG: dict[str, tuple[dict[str, Any], Any]] = {
    "no fields": (FIELDS_ALONE, lambda made: MadeRows()),
    "another dtype": (
        FIELDS_ALONE,
        lambda made: made._replace(
            pictures={name: (form[0], np.dtype("i1")) for name, form in made.pictures.items()}
        ),
    ),
    "what a transform returns": (FIELDS_ALONE, lambda made: made._replace(results={})),
    "bad rows of others": (RAGGED, lambda made: made._replace(bad=frozenset([1]))),
    "a longer list": (RAGGED, lambda made: made._replace(lists={n: [1, 2] for n in made.lists})),
    "another list": (RAGGED, lambda made: made._replace(lists={**made.lists, "more": [1]})),
    "a larger form": (RAGGED, lambda made: made._replace(results={**made.results, **OTHER_FORM})),
    "a bad row of another type": (FIELDS_ALONE, lambda made: made._replace(bad=frozenset([0.0]))),
    "a sample that is missing": (LISTED, lambda made: made._replace(samples=[None])),
    "a sample of another type": (LISTED, lambda made: made._replace(samples=[1])),
    "what a collate takes": (RAGGED, lambda made: made._replace(samples=[{}])),
    "objects": (RAGGED, lambda data: data.replace(b'"<f8"', b'"|O8"')),
    "an end amid the JSON": (RAGGED, lambda data: bytes([data[0] - 9]) + data[1:]),
    "fewer bytes": (RAGGED, lambda data: data[:16] + bytes([data[16] - 8]) + data[17:]),
    "no end": (RAGGED, lambda data: data[:7] + b"" + data[8:]),
}


@pytest.mark.usefixtures("slow_here")
@pytest.mark.parametrize("kind", WRONG)
def test_an_answer_that_is_wrong_loses_the_feeder_and_changes_no_row(
    tmp_path, feeders, core, monkeypatch, caplog, kind
) -> None:
    options, alter = WRONG[kind]

    def send(made: socket.socket, value: Any, pieces: Any = ()) -> int:
        if not isinstance(value, tuple):
            return wire.send(made, value, pieces)
        with contextlib.suppress(AttributeError, IndexError, TypeError):  # of bytes
            altered = alter(MadeRows(*value))
            return wire.send(made, tuple(altered), () if altered == MadeRows() else pieces)
        caught = Caught()
        wire.send(caught, value, pieces)  # type: ignore[arg-type]
        made.sendall(alter(caught.data))
        return 0

    monkeypatch.setattr(serve, "send", send)
    monkeypatch.setattr(offload, "RETRY_S", LIMIT_S)
    with open_pool(tmp_path) as pool:
        expected = gathered(pool, **HERE, **options)
        gather = make_gather(pool, FIELDS, **HERE, **options, feeders=feeders)
        with contextlib.closing(gather):
            assert_same(expected, [*gather.batches(pick_in_turn(40), range(5), epoch=1)])
            there = gather.feeders
            assert there is not None
            wait_for(lambda: there.num_cores == 0)
            assert there.rows == 0
    assert caplog.text.count("a core of it has failed (it ") == 1


@pytest.mark.usefixtures("slow_here", "core")
def test_an_answer_that_trickles_is_not_waited_for(tmp_path, feeders, monkeypatch, caplog) -> None:
    def send(made: socket.socket, value: Any, pieces: Any = ()) -> int:
        if not isinstance(value, tuple):
            return wire.send(made, value, pieces)
        caught = Caught()
        wire.send(caught, value, pieces)  # type: ignore[arg-type]
        *_, behind = wire.LENGTHS.unpack(caught.data[: wire.LENGTHS.size])
        made.sendall(caught.data[:-behind])
        for place in range(-behind, 0):
            time.sleep(0.01)
            made.sendall(caught.data[place:][:1])
        return 0

    monkeypatch.setattr(serve, "send", send)
    monkeypatch.setattr(Feeders, "_help", lambda self, awaited: None)
    monkeypatch.setattr(offload, "RETRY_S", LIMIT_S)
    monkeypatch.setattr(offload, "FIRST_LIMIT_S", 0.3)
    with open_pool(tmp_path) as pool:
        gather = make_gather(pool, FIELDS, **HERE, feeders=feeders)
        with contextlib.closing(gather):
            batches = [*gather.batches(pick_in_turn(40), range(5), epoch=1)]
            assert_same(gathered(pool, **HERE), batches)
            assert gather.feeders is not None
            assert gather.feeders.rows == 0
    assert caplog.text.count("did not answer within 0.3 s") == 1


def test_who_does_not_know_the_secret_is_not_served(tmp_path, feeders, core, caplog) -> None:
    core.core._secret = b"another"
    with open_pool(tmp_path) as pool:
        expected = gathered(pool, **HERE)
        gather = make_gather(pool, FIELDS, **HERE, feeders=feeders)
        with contextlib.closing(gather):
            assert_same(expected, [*gather.batches(pick_in_turn(40), range(5), epoch=1)])
            assert gather.feeders is not None
            assert gather.feeders.num_cores == gather.feeders.rows == 0
    assert "another one answers there, and is not used; remove its file" in caplog.text
    assert "did not know the secret, and was closed" in caplog.text


def test_a_directory_of_others_is_refused(tmp_path, feeders) -> None:
    with open_pool(tmp_path) as pool:
        for mode in (0o755, 0o500):
            feeders.mkdir()
            feeders.chmod(mode)
            with pytest.raises(
                WorkerError, match=rf"has mode 0{mode:o}, expected.*0700.*chmod 700"
            ):
                gathered(pool, **HERE, feeders=feeders)
            feeders.rmdir()
        with pytest.raises(WorkerError, match=r"cannot be made \(No such file.*make the one above"):
            gathered(pool, **HERE, feeders=feeders / "below")
        (tmp_path / "link").symlink_to(tmp_path)
        with pytest.raises(WorkerError, match="expected a directory that user"):
            serve.run_feeder(tmp_path / "link", num_cores=1)
    with pytest.raises(WorkerError, match=r"cannot listen at 192.0.2.1 .*--host"):
        serve.run_feeder(feeders, num_cores=1, host="192.0.2.1")


def of_a_script(sample: Any, rng: object) -> Any:
    return sample


def test_what_feeders_cannot_do_is_refused_by_name(tmp_path, feeders, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "of_a_script", of_a_script, raising=False)
    monkeypatch.setattr(of_a_script, "__module__", "__main__")
    with open_pool(tmp_path) as pool:
        with pytest.raises(ValueError, match=r"^transform: .* the script itself.*give no feeders"):
            gathered(pool, **HERE, feeders=feeders, transform=of_a_script)
        with pytest.raises(ValueError, match=r"^transform: .*lambda.*or give no feeders"):
            gathered(pool, **HERE, feeders=feeders, transform=lambda sample, rng: sample)
        for options in ({"num_processes": 1}, {"num_threads": 0}, {"prefetch": 0}):
            with pytest.raises(ValueError, match=r"^Workers: feeders and .* exclude one another"):
                gathered(pool, feeders=feeders, **(HERE | options))


def test_rows_without_work_are_never_sent(tmp_path, feeders, core) -> None:
    fields = {name: FIELDS[name] for name in ("tokens", "data", "grid")}
    with open_pool(tmp_path, fields) as pool:
        gather = make_gather(pool, fields, **HERE, feeders=feeders)
        assert gather.feeders is None
        gather.close()

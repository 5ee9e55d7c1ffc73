"""What else leads from one attempt to the next, what stands in the log, and what damages it."""

import json
import logging
import os
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

import shuffle
from dataio import Loader, Mixture, Reports, StateError, Workers
from dataio.plan.layout import Layout
from dataio.plan.policies import Local, Selection
from dataio.rowlog.answers import Answers
from dataio.rowlog.attempts import find_course
from dataio.rowlog.files import HEAD, MAGIC, PLACE, pack_place
from dataio.rowlog.packed import pack_selection, unpack_selection
from dataio.rowlog.reading import read_log
from dataio.world import single_world
from importance import Kakurenbo, RandomPrune
from tests.dataio.exclude_run import make, some
from tests.dataio.growing import shards as growing
from tests.dataio.rowlog.played import as_rows


def open_answers(root, policy=None):
    logged = read_log(root / "rows")
    return Answers(find_course(logged.attempts), logged, policy or Local())


def make_logged(root, **options) -> Loader:
    reports = Reports(progress=False, rows=root / "rows")
    return make(single_world(), root / "cache", reports=reports, **options)


def ids_of(found, pieces) -> list[list[int]]:
    """Samples of each piece, in their order."""
    return [[row[5] for row in as_rows(0, found.at(p, p.steps))] for p in pieces if len(p.steps)]


@given(st.data(), st.integers(1, 300))
def test_a_selection_comes_back_as_it_was(data, num_rows):
    hidden = np.array(sorted(data.draw(st.sets(st.integers(0, num_rows - 1)))), np.int64)
    kinds = data.draw(st.sampled_from([1, 2, 5, 400]))
    weights = np.arange(num_rows, dtype=np.float32)[::-1] % kinds / 3
    selection = Selection(hidden, weights if data.draw(st.booleans()) else None)
    again = unpack_selection(pack_selection(selection, num_rows))
    assert again.hidden.tolist() == hidden.tolist()
    visible = np.setdiff1d(np.arange(num_rows), hidden)
    if selection.weights is not None and len(visible):
        assert again.weights is not None
        assert again.weights[visible].tolist() == weights[visible].tolist()
    counts = np.arange(num_rows) % kinds
    drawn = Selection(np.flatnonzero(counts == 0), counts=counts)
    again = unpack_selection(pack_selection(drawn, num_rows))
    assert again.counts is not None
    assert again.counts.tolist() == counts.tolist()


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3, 0.5])
def test_a_hidden_row_costs_less_than_a_quarter_of_a_byte(share):
    num_rows = 100_000
    rows = np.random.default_rng(0).permutation(num_rows)[: int(share * num_rows)]
    plain = Selection(np.sort(rows))
    weighted = Selection(np.sort(rows), np.where(np.arange(num_rows) % 3, 1, 2).astype(np.float32))
    assert len(pack_selection(plain, num_rows)) < 0.15 * num_rows
    assert len(pack_selection(weighted, num_rows)) < 0.25 * num_rows


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=5),
    st.integers(0, 80),
    st.integers(0, 4),
    st.sampled_from([shuffle.Partial(0.3), shuffle.Global(moves=True), shuffle.Global(), Local()]),
)
def test_rows_are_followed_to_where_they_are_traced_from(replicas, more, epochs, policy):
    layout = Layout(tuple(replicas), sum(replicas) + more)
    every = homes = np.arange(layout.num_samples)
    for epoch in range(1, 1 + epochs):
        homes = policy.follow(layout, homes, epoch=epoch, seed=3, first_epoch=1)
    back = policy.trace(layout, homes, epoch=1 + epochs, seed=3, first_epoch=1)
    assert back.tolist() == every.tolist()


def test_a_state_dict_leads_back_and_what_was_trained_beyond_is_thrown_away(tmp_path):
    with make_logged(tmp_path) as loader:
        batches = iter(loader)
        first = [next(batches)["sample_id"].tolist() for _ in range(5)]
        state = loader.state_dict()
        thrown = [next(batches)["sample_id"].tolist() for _ in range(3)]
        loader.load_state_dict(state)
        again = [batch["sample_id"].tolist() for batch in loader]
    assert again[:3] == thrown
    found = open_answers(tmp_path)
    assert found.course.is_whole
    kept = [i for part in ids_of(found, found.course.kept) for i in part]
    assert kept == [i for batch in (*first, *again) for i in batch if i >= 0]
    assert ids_of(found, found.course.discarded) == [[i for batch in thrown for i in batch]]
    assert [p.run_steps for p in found.course.discarded] == [range(6, 9)]


def test_an_epoch_that_is_asked_for_twice_is_trained_twice(tmp_path):
    with make_logged(tmp_path) as loader:
        for epoch in (0, 1, 1, 0):
            loader.set_epoch(epoch)
            assert len([*loader]) == 26
    found = open_answers(tmp_path)
    epochs = [p.attempt.epoch for p in found.course.kept if len(p.steps)]
    assert epochs == [0, 1, 1, 0]
    assert not found.course.discarded
    assert [p.run_steps.start for p in found.course.kept if len(p.steps)] == [1, 27, 53, 79]


def test_a_run_from_what_is_in_no_log_is_not_whole(tmp_path):
    with make(single_world(), tmp_path / "cache") as loader:
        next(iter(loader))
        loader.save(tmp_path / "saved")
    with make_logged(tmp_path) as loader:
        loader.restore(tmp_path / "saved")
        rest = [i for batch in loader for i in batch["sample_id"].tolist() if i >= 0]
    found = open_answers(tmp_path)
    assert not found.course.is_whole
    assert ids_of(found, found.course.kept) == [rest]


def test_each_loader_of_a_mixture_has_a_log_of_its_own(tmp_path):
    loaders = {
        name: make_logged(tmp_path / name, seed=seed) for seed, name in enumerate(["web", "code"])
    }
    seen: dict[str, list[int]] = {"web": [], "code": []}
    with Mixture(loaders, {"web": 1, "code": 3}, steps=40) as mixture:
        for _ in mixture.epochs(2):
            for batch in mixture:
                seen[str(batch["dataset"])] += [i for i in batch["sample_id"].tolist() if i >= 0]
    for name, trained in seen.items():
        found = open_answers(tmp_path / name)
        assert [i for part in ids_of(found, found.course.kept) for i in part] == trained


@pytest.mark.parametrize("policy", ["partial", "moves"])
def test_samples_that_were_appended_are_found_from_their_epoch_on(tmp_path, policy):
    directory = growing.Directory(tmp_path / "shards")
    reports = Reports(progress=False, rows=tmp_path / "rows")
    trained: list[Counter[int]] = []
    with growing.make(
        single_world(), tmp_path, directory.path, policy, reports=reports
    ) as loader:  # fmt: skip
        for epoch in loader.epochs(3):
            trained.append(Counter(i for b in loader for i in b["sample_id"].tolist() if i >= 0))
            if epoch == 0:
                directory.append(13)
    found = open_answers(tmp_path, growing.SHUFFLES[policy])
    answered = [Counter(part) for part in ids_of(found, found.course.kept)]
    assert answered == trained
    new = np.array([directory.num_samples - 1])
    assert [found.of(p, new).states[0] for p in found.course.kept] == [None, "trained", "trained"]


@pytest.fixture
def logged(tmp_path):
    options = {"importance": Kakurenbo(0.4, drops=(), alphas=(1.0,), warmup_epochs=0)}
    with make_logged(tmp_path, exclude=some(0.1), **options) as loader:
        for epoch in loader.epochs(2):
            for batch in loader:
                ids = batch["sample_id"]
                loader.report(batch, (ids % 7).float(), ids % 5 > 0, (ids % 7 > 0) * 0.9)
            del epoch
    return tmp_path


@pytest.mark.parametrize("left", ['{"attempt": 2, "aft', "\0" * 300], ids=["kill", "power cut"])
def test_a_line_that_was_cut_off_is_none(logged, left):
    log = logged / "rows" / "log.jsonl"
    whole = open_answers(logged).course
    with log.open("a") as file:
        file.write(left)
    assert open_answers(logged).course == whole
    with make_logged(logged) as loader:
        next(iter(loader))
    assert [a.number for a in open_answers(logged).course.attempts] == [0, 1, 2]


def test_every_changed_byte_of_what_was_hidden_or_left_out_is_found(logged):
    excluded = next((logged / "rows").glob("excluded-*.bin"))
    for path in (logged / "rows" / "node-0.bin", excluded):
        data = bytearray(path.read_bytes())
        for place in range(0, len(data), 11):
            changed = data.copy()
            changed[place] ^= 1
            path.write_bytes(changed)
            found = open_answers(logged)
            with pytest.raises(StateError, match=r"the log of rows is damaged: .*from a copy"):
                ids_of(found, found.course.kept)
        path.write_bytes(data)


def test_what_a_kill_left_of_an_attempt_without_a_line_is_written_over(tmp_path):
    rows = tmp_path / "rows"
    rows.mkdir()
    data = pack_selection(Selection(np.arange(7)), 100)
    head = HEAD.pack(MAGIC, 0, len(data), xxh3_64_intdigest(data))
    (rows / "node-0.bin").write_bytes(head + data)
    with make_logged(tmp_path, importance=RandomPrune(0.3, delta=1.0)) as loader:
        trained = [i for batch in loader for i in batch["sample_id"].tolist() if i >= 0]
    found = open_answers(tmp_path)
    assert ids_of(found, found.course.kept) == [trained]


def test_a_line_that_is_missing_is_found(logged):
    log = logged / "rows" / "log.jsonl"
    lines = log.read_text().splitlines()
    log.write_text("\n".join(line for line in lines if '"attempt": 1' not in line))
    with pytest.raises(StateError, match="attempt 1 is missing"):
        read_log(log.parent)


def test_a_changed_line_is_found(logged):
    log = logged / "rows" / "log.jsonl"
    lines = log.read_text().splitlines()
    for number, line in enumerate(lines):
        stored = json.loads(line)
        name = next(iter(stored))
        stored[name] = {"attempt": 7, "ended": 1, "log": "other"}.get(name, {"seed": 5})
        log.write_text("\n".join([*lines[:number], json.dumps(stored), *lines[number + 1 :]]))
        with pytest.raises(StateError, match=rf"line {number + 1} does not match its checksum"):
            read_log(log.parent)


def test_every_changed_byte_of_a_line_is_found(logged):
    log = logged / "rows" / "log.jsonl"
    data = log.read_bytes()
    first = data.index(b'{"attempt": 1')
    for place in range(0, len(data), 2):
        log.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(StateError, match="the log of rows is damaged"):
            read_log(log.parent)
    for stop in range(first + 1, len(data) - 1):
        log.write_bytes(data[:stop] + b"\n" + data[first:])
        assert [attempt.number for attempt in read_log(log.parent).attempts] == [0, 1]


@pytest.fixture
def ended_early(tmp_path):
    """A run that ended five batches into its second epoch; and the ids of these."""
    loader = make_logged(tmp_path, workers=Workers(threads=0, prefetch=0))
    for epoch in loader.epochs(2):
        for batch in loader:
            if epoch == 1 and loader.step == 5:
                loader.__exit__(KeyboardInterrupt, None, None)
                assert batch["sample_id"].numel()
                return tmp_path
    raise AssertionError


def test_every_changed_bit_of_how_far_a_run_came_is_found(ended_early):
    steps = ended_early / "rows" / "steps"
    data = steps.read_bytes()
    piece = open_answers(ended_early).course.kept[-1]
    assert (piece.attempt.epoch, len(piece.steps)) == (1, 5)
    for place in range(8 * len(data)):
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        steps.write_bytes(changed)
        with pytest.raises(StateError, match=r"steps: the log of rows is damaged: .*checksum"):
            read_log(steps.parent)
    for cut in (0, 8, 16, len(data) - 1):
        steps.write_bytes(data[:cut])
        with pytest.raises(StateError, match=rf"steps: .* it has {cut} bytes, expected"):
            read_log(steps.parent)
    steps.write_bytes(pack_place("another", *PLACE.unpack(data[: PLACE.size])))
    with pytest.raises(StateError, match="does not match its checksum, or is of another log"):
        read_log(steps.parent)
    steps.write_bytes(bytes(len(data)))
    with pytest.raises(StateError, match="does not match its checksum"):
        make_logged(ended_early)
    steps.unlink()
    with pytest.raises(StateError, match=r"steps: .* it cannot be read .*No such file"):
        read_log(steps.parent)
    # A log in which no attempt began has no steps to miss.
    log = steps.with_name("log.jsonl")
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:2]))
    assert read_log(steps.parent).attempts == ()
    steps.write_bytes(data)
    with pytest.raises(StateError, match=r"attempt \d is missing"):
        read_log(steps.parent)


def test_a_run_that_was_killed_before_its_first_step_has_trained_nothing(tmp_path):
    with make_logged(tmp_path) as loader:
        loader.order_hash()  # the first epoch has begun
        assert [len(piece.steps) for piece in open_answers(tmp_path).course.kept] in ([], [0])


def test_a_log_that_cannot_be_opened_is_refused(tmp_path):
    (tmp_path / "rows").write_text("")
    with pytest.raises(StateError, match=r"reports.rows: .* cannot be written .*; give a"):
        make_logged(tmp_path)
    with pytest.raises(ValueError, match=r"Reports: rows is empty, expected a path; give one"):
        Reports(rows="")


def test_a_log_that_can_no_longer_be_written_costs_a_warning(tmp_path, monkeypatch, caplog):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with make_logged(tmp_path) as loader, caplog.at_level(logging.WARNING):
        next(iter(loader))
        monkeypatch.setattr(os, "pwrite", full)
        assert len([*loader]) == 25
    warned = [record for record in caplog.records if "log of rows cannot be" in record.message]
    assert len(warned) == 1


@pytest.mark.parametrize("helps", [2, 4, None])
def test_lines_that_a_full_disk_refused_are_written_when_it_has_room(tmp_path, monkeypatch, helps):
    write, room = os.write, [10]

    def full(descriptor: int, data: bytes) -> int:
        return write(descriptor, data[: room[0]])

    trained = []
    with make_logged(tmp_path) as loader:
        for epoch in loader.epochs(4):
            if epoch == 0:
                monkeypatch.setattr(os, "write", full)
            if epoch == helps:
                room[0] = 10_000
            trained.append([i for b in loader for i in b["sample_id"].tolist() if i >= 0])
        if helps == 4:  # after all, before it is saved
            room[0] = 10_000
        loader.save(tmp_path / "saved")
        if helps:
            found = open_answers(tmp_path)
            assert ids_of(found, found.course.kept) == trained
    monkeypatch.setattr(os, "write", write)
    with make_logged(tmp_path) as loader:
        loader.restore(tmp_path / "saved")
        for epoch in range(4, 8):  # as many attempts as have no line
            loader.set_epoch(epoch)
            trained.append([i for batch in loader for i in batch["sample_id"].tolist() if i >= 0])
    found = open_answers(tmp_path)
    assert found.course.is_whole == bool(helps)
    assert ids_of(found, found.course.kept) == (trained if helps else trained[4:])
    assert not found.course.discarded


def test_what_is_hidden_and_a_full_disk_refused_is_there_once_something_is_saved(
    tmp_path, monkeypatch
):
    pwrite = os.pwrite
    refused: list[int] = []

    def full_once(descriptor: int, data: bytes, offset: int) -> int:
        if not refused and memoryview(data)[:4] == MAGIC:
            refused.append(pwrite(descriptor, data[:20], offset))
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, data, offset)

    def read() -> object:
        found = open_answers(tmp_path)
        return ids_of(found, found.course.kept)

    trained = []
    with make_logged(tmp_path, importance=RandomPrune(0.3, delta=1.0)) as loader:
        for _ in loader.epochs(2):
            trained.append([i for b in loader for i in b["sample_id"].tolist() if i >= 0])
            monkeypatch.setattr(os, "pwrite", full_once)
        assert refused
        with pytest.raises(StateError, match=r"what epoch 1 hid .* the disk may have been full"):
            read()
        loader.save(tmp_path / "saved")
        assert read() == trained

"""What the names in a cache mean: nothing in force is litter, whatever a kill left beside it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.base.atomic import read_record
from dataio.base.errors import CacheError
from dataio.store.cache import Cache
from dataio.store.state import (
    Head,
    base_name,
    delta_name,
    given_prefix,
    judge,
    next_deltas,
    next_serial,
    staged_prefix,
    surplus_name,
)
from shuffle import Partial
from tests.faults.samples import Job, check_each_once, check_files, node_directory, train

SERIALS, EPOCHS, SHARES = range(4), range(6), range(2)
ROWS = ("fixed-0.npy", "headers.npy", "heap-0.bin", "heap-11.bin")
OTHERS = ("meta.json", "manifest.json", "lock", "bandwidth", "notes.txt", "base.arrow", "deltas")
TABLES = [
    *(name(serial) for serial in SERIALS for name in (base_name, surplus_name)),
    *(delta_name(epoch, share) for epoch in EPOCHS for share in SHARES),
    *(
        f"{prefix(serial, share)}{lap}.arrow"
        for serial in SERIALS
        for prefix in (staged_prefix, given_prefix)
        for share in SHARES
        for lap in range(2)
    ),
]
PARTIAL = [f"{name}.partial" for name in (*TABLES, "manifest.json", "meta.json")]
NAMES = [*TABLES, *PARTIAL, *ROWS, *OTHERS, "scores-x1y2.npy"]


@st.composite
def heads(draw) -> Head:
    epoch, shares = draw(st.sampled_from(EPOCHS[3:-1])), draw(st.sampled_from([1, 2]))
    deltas = tuple(
        tuple(delta_name(epoch - back, share) for share in range(shares))
        for back in reversed(range(draw(st.integers(0, 3))))
    )
    missing = 0 if deltas else draw(st.integers(0, 9))
    return Head(
        draw(st.sampled_from(SERIALS)), epoch, "placement", 9, missing, deltas, 0,
        has_surplus=not deltas and draw(st.booleans()), is_filled=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def directories(draw) -> tuple[set[str], Head]:
    """All that a manifest names, and anything beside it."""
    head = draw(heads())
    return draw(st.sets(st.sampled_from(NAMES))) | set(head.named), head


@given(directories())
def test_nothing_in_force_and_nothing_foreign_is_litter(directory):
    names, head = directory
    verdict = judge(names, head)
    assert not set(verdict.litter) & {*head.named, *verdict.staged, *verdict.given}
    assert not set(verdict.litter) & {*ROWS, *OTHERS}
    assert set(verdict.litter) <= names
    assert not verdict.absent


@given(directories())
def test_without_its_litter_a_directory_means_the_same(directory):
    names, head = directory
    verdict = judge(names, head)
    assert judge(names - set(verdict.litter), head) == replace(verdict, litter=())


@given(directories(), st.sets(st.sampled_from(NAMES)))
def test_litter_beside_it_changes_nothing_in_force(directory, more):
    names, head = directory
    before = judge(names, head)
    litter = set(judge(names | more, head).litter)
    assert replace(judge(names | (more & litter), head), litter=()) == replace(before, litter=())


@given(directories())
def test_what_is_in_force_is_of_the_base_in_force_and_all_else_of_the_caches_own_is_litter(
    directory,
):
    names, head = directory
    verdict = judge(names, head)
    assert all(name.startswith(staged_prefix(head.serial)) for name in verdict.staged)
    assert all(name.startswith(given_prefix(head.serial)) for name in verdict.given)
    left = names - {*head.named, *verdict.staged, *verdict.given, *verdict.litter}
    assert left <= {*ROWS, *OTHERS} | next_deltas(head)
    assert left >= next_deltas(head) & names or not next_deltas(head) <= names
    # Laid over a base with deltas they would take the place of newer rows.
    assert not (head.deltas and verdict.staged)


@given(directories(), st.data())
def test_a_file_in_force_that_is_gone_is_named(directory, data):
    names, head = directory
    gone = data.draw(st.sets(st.sampled_from(head.named)))
    assert set(judge(names - gone, head).absent) == gone


@given(st.sets(st.sampled_from(NAMES)))
def test_without_a_manifest_all_but_rows_and_foreign_files_is_litter(names):
    verdict = judge(names, None)
    assert verdict.state == "new"
    assert set(verdict.litter) == names - {*ROWS, *OTHERS}


@given(st.sets(st.sampled_from(NAMES)))
def test_a_new_serial_is_behind_all_that_are_there(names):
    serial = next_serial(names)
    assert not names & {base_name(serial), surplus_name(serial)}
    assert not any(name.startswith(staged_prefix(serial)) for name in names)
    assert not any(name.startswith(given_prefix(serial)) for name in names)


@given(heads())
def test_a_head_is_read_back_as_it_was_written(head):
    assert Head.from_record(head.to_record()) == head


@given(heads().filter(lambda head: not head.deltas), st.integers(1, 9))
def test_no_delta_is_laid_over_a_base_that_misses_rows(head, missing):
    names = (delta_name(head.epoch + 1, 0),)
    with pytest.raises(AssertionError, match="committed before others move"):
        replace(head, missing=missing).with_delta(
            names, epoch=head.epoch + 1, placement="next", moved=1
        )
    after = replace(head, missing=0).with_delta(
        names, epoch=head.epoch + 1, placement="next", moved=1
    )
    assert judge({*after.named, f"{staged_prefix(head.serial)}0-0.arrow"}, after).staged == ()


JOB = Job((2, 1), "both", epochs=3, options={"shuffle": Partial(0.4)})


def test_rows_that_were_staged_before_a_kill_are_older_than_those_that_arrive(
    tmp_path, monkeypatch
):
    """Stopped when all staged rows are sealed, before they are committed: then rows move."""
    expected = train(JOB, tmp_path / "whole", saves=tmp_path)

    def killed(cache):
        raise CacheError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Cache, "fill_commit", killed)
        with pytest.raises(CacheError, match="killed"):
            train(JOB, tmp_path / "killed", saves=tmp_path)
    directory = node_directory(tmp_path / "killed", 0)
    assert sorted(directory.glob("staged-*"))
    for _ in range(2):
        found = train(JOB, tmp_path / "killed", saves=tmp_path)
        check_each_once(JOB, found)
        assert found == expected
        check_files(JOB, tmp_path / "killed")
    assert Head.from_record(read_record(directory / "manifest.json")).deltas


def test_rows_that_arrived_and_are_forgotten_leave_no_delta(tmp_path, monkeypatch):
    """As where a run is left, or goes elsewhere, amid an epoch with an exchange."""
    alone, seen = replace(JOB, nodes=(1, 1)), []
    forget = Cache.forget_arrivals

    def watched(cache):
        for sync in cache.background.seals:
            sync.result()
        seen.append(sorted(path.name for path in cache.directory.glob("delta*")))
        forget(cache)

    monkeypatch.setattr(Cache, "forget_arrivals", watched)
    train(alone, tmp_path / "cache", saves=tmp_path, num_batches=2)
    assert ["delta-1-0.arrow"] in seen, "it was sealed when the last row came"
    check_files(alone, tmp_path / "cache")
    for node in range(2):
        assert not list(node_directory(tmp_path / "cache", node).glob("delta*"))


def test_what_no_manifest_names_is_removed_when_a_cache_is_opened(tmp_path):
    expected = train(JOB, tmp_path / "cache", saves=tmp_path)
    planted = [
        "base-77.arrow", "base-0.arrow.partial", "surplus-77.arrow", "delta-1-9.arrow",
        "delta-99-0.arrow", "staged-77-0-0.arrow", "given-77-0-0.arrow", "manifest.json.partial",
        "scores-abc.npy",
    ]  # fmt: skip
    for node in range(2):
        directory = node_directory(tmp_path / "cache", node)
        for name in (*planted, "notes.txt"):
            (directory / name).write_bytes(b"litter")
    assert train(JOB, tmp_path / "cache", saves=tmp_path) == expected
    for node in range(2):
        directory = node_directory(tmp_path / "cache", node)
        assert not {path.name for path in directory.iterdir()} & set(planted)
        (directory / "notes.txt").unlink()
    check_files(JOB, tmp_path / "cache")


def test_deltas_of_the_next_epoch_stay_where_rows_of_the_epoch_before_may_be_gone(tmp_path):
    """All of them: then its arrivals may be followed by others, where the rows lay that left."""
    train(JOB, tmp_path / "cache", saves=tmp_path)
    directory = node_directory(tmp_path / "cache", 0)
    head = Head.from_record(read_record(directory / "manifest.json"))
    assert sorted(next_deltas(head)) == [
        f"delta-{head.epoch + 1}-{share}.arrow" for share in (0, 1)
    ]
    names = {path.name for path in directory.iterdir()}
    for some in ({delta_name(head.epoch + 1, 0)}, {delta_name(head.epoch + 1, 1)}):
        assert set(judge(names | some, head).litter) == some
    assert judge(names | next_deltas(head), head).litter == ()

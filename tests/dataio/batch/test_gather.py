"""Batches hold what the samples held, however they are made; rows that do not are dealt with."""

import os
import traceback
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from dataio import CacheError, CorruptRowError, FieldError, StallError, WorkerError
from dataio.batch import verify
from dataio.batch.prefetch import Prefetcher
from dataio.plan.order import PADDING
from dataio.rows.fields import Array, Bytes, Field, Image, Int
from dataio.rows.rows import FixedColumn
from tests.dataio.batch.gather_pool import FIELDS, gathered, open_pool, pick_in_turn, pixels, value
from tests.opened import make_gather

PLAIN: Mapping[str, Field] = {"grid": FIELDS["grid"], "label": FIELDS["label"]}
BYTES = {"data": Bytes("bin"), "label": Int("cls")}


def same(a, b):
    """Whether two values of batches are equal, whatever their kind."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, int):
        return a == b
    return len(a) == len(b) and all(
        same(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True)
    )


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert list(a) == list(b)
        assert all(same(a[name], b[name]) for name in a)


@pytest.mark.parametrize("num_threads", [0, 3])
def test_every_kind_of_field_comes_as_it_was(tmp_path, num_threads):
    with open_pool(tmp_path) as pool:
        batches = gathered(pool, num_threads=num_threads)
    seen = []
    for batch in batches:
        for row, i in enumerate(batch["sample_id"].tolist()):
            assert torch.equal(batch["image"][row].permute(1, 2, 0), torch.from_numpy(pixels(i)))
            assert batch["image"].is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(batch["grid"][row], torch.full((5, 7), float(i)))
            assert batch["data"][row] == value("data", i)
            assert batch["text"][row] == value("text", i)
            padded = [*range(i, i + i % 7), -1, -1, -1, -1][:4]
            assert batch["tokens"][row].tolist() == padded
            assert batch["ragged"][row].tolist() == value("ragged", i).tolist()
            assert batch["ragged"][row].dtype == torch.int32
            assert batch["label"][row] == i % 10
            seen.append(i)
    assert sorted(seen) == list(range(40))


def test_images_decoded_at_staging_come_with_channels_last(tmp_path):
    class Decoded(Image):
        def column(self, name):
            return FixedColumn(name, "|u1", (6, 5, 3))

    fields: Mapping[str, Field] = {"image": Decoded("png"), "label": Int("cls")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.dataio.batch.gather_pool.png", lambda i: pixels(i).tobytes())
        with open_pool(tmp_path, fields) as pool:
            plain = gathered(pool, fields)
            changed = gathered(pool, fields, transform=lambda sample, rng: sample, num_threads=2)
    for batch, other in zip(plain, changed, strict=True):
        assert batch["image"].shape == other["image"].shape == (8, 3, 6, 5)
        for row, i in enumerate(batch["sample_id"].tolist()):
            expected = torch.from_numpy(pixels(i)).permute(2, 0, 1)
            assert torch.equal(batch["image"][row], expected)
            assert torch.equal(other["image"][row], expected)


def test_padding_says_so_and_weighs_nothing(tmp_path):
    with open_pool(tmp_path, PLAIN) as pool:
        gather = make_gather(pool, PLAIN, num_threads=0)
        batches = list(gather.batches(pick_in_turn(40, num_valid=7), range(5), epoch=0))
        gather.close()
    for batch in batches:
        assert batch["slot"][7] == batch["sample_id"][7] == PADDING
        assert (batch["slot"][:7] >= 0).all()
        assert batch["weight"].tolist() == [1.0] * 7 + [0.0]


def test_batches_do_not_depend_on_where_a_block_ends(tmp_path, monkeypatch):
    with open_pool(tmp_path) as pool:
        whole = gathered(pool)
        monkeypatch.setattr("dataio.batch.lookup.BLOCK_ROWS", 8)
        assert_same(whole, gathered(pool))
        monkeypatch.setattr("dataio.batch.gather.INLINE_BYTES", 0)
        assert_same(whole, gathered(pool, num_threads=2))


def test_a_kept_batch_of_any_kind_never_changes(tmp_path):
    with open_pool(tmp_path) as pool:
        gather = make_gather(pool, FIELDS, num_threads=2)
        pick = pick_in_turn(40)
        kept = list(gather.batches(pick, range(5), epoch=0))
        copies = [
            {
                name: v.clone() if isinstance(v, torch.Tensor) else [*map(copy_of, v)]
                for name, v in batch.items()
            }
            for batch in kept
        ]
        for _ in range(3):
            for _batch in gather.batches(pick, range(5), epoch=0):
                pass
        gather.close()
    assert_same(kept, copies)


def copy_of(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


def stack(samples):
    """Samples of varying shape side by side."""
    return {"longest": max(len(sample["ragged"]) for sample in samples), "count": len(samples)}


@pytest.mark.parametrize("num_threads", [0, 2])
def test_collate_makes_the_batch_of_samples(tmp_path, num_threads):
    with open_pool(tmp_path) as pool:
        batches = gathered(pool, collate=stack, num_threads=num_threads)
        listed = gathered(pool, collate=lambda samples: samples, num_threads=num_threads)
    for batch, samples in zip(batches, listed, strict=True):
        ids = batch["sample_id"].tolist()
        assert batch["longest"] == max(i % 7 for i in ids)
        assert set(batch) == {"longest", "count", "weight", "sample_id", "slot"}
        assert [sample["text"] for sample in samples] == [value("text", i) for i in ids]


def grow(sample, rng):
    return {"x": np.zeros(1 + int(sample["label"]) % 2)}


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_transform_whose_samples_differ_in_shape_is_named(tmp_path, num_threads):
    with open_pool(tmp_path, PLAIN) as pool:
        with pytest.raises(FieldError, match=r"sample \d+, field 'x': returned .*expected.*collat"):
            gathered(pool, PLAIN, transform=grow, num_threads=num_threads)


def test_a_transform_may_write_into_its_sample(tmp_path):
    def double(sample, rng):
        sample["grid"] *= 2
        sample["pair"] *= 2
        return sample

    fields = {**PLAIN, "pair": Array("pair", (2,), "float32")}
    with open_pool(tmp_path, fields) as pool:
        for batch in gathered(pool, fields, transform=double, num_threads=2):
            assert torch.equal(batch["grid"][:, 0, 0], 2.0 * batch["sample_id"])
            assert torch.equal(batch["pair"][:, 0], 2.0 * batch["sample_id"])


def test_an_error_in_a_transform_names_the_sample(tmp_path):
    def fail(sample, rng):
        raise ArithmeticError("no")

    with open_pool(tmp_path, PLAIN) as pool:
        with pytest.raises(
            WorkerError, match=r"sample \d+, epoch 1: .*ArithmeticError: no"
        ) as caught:
            gathered(pool, PLAIN, transform=fail, num_threads=2)
    cause = caught.value.__cause__
    assert isinstance(cause, ArithmeticError)
    assert traceback.extract_tb(cause.__traceback__)[-1].name == "fail", "the user's own frame"


def flip(pool, slot, field=0):
    """Change a byte of a row on disk, behind the cache's back."""
    cache = pool.cache
    if cache.files.fixed:
        cache.files.fixed[field].rows[cache.entries.position[np.array([slot])], 0] ^= 1
        return
    with open(cache.directory / "heap-0.bin", "r+b") as heap:
        heap.seek(int(cache.entries.offset[slot]))
        byte = heap.read(1)[0]
        heap.seek(-1, 1)
        heap.write(bytes([byte ^ 1]))


KINDS = [PLAIN, BYTES, {"data": Bytes("bin")}, {"grid": Array("grid", (5, 7), "float32")}]


@pytest.mark.parametrize("fields", KINDS, ids=lambda fields: "+".join(fields))
def test_a_flipped_byte_is_found_and_named(tmp_path, fields):
    with open_pool(tmp_path, fields) as pool:
        gathered(pool, fields, verify="always")
        flip(pool, 17)
        with pytest.raises(CorruptRowError, match=r"slot 17 \(sample 17\).*cache verify.*skip"):
            gathered(pool, fields)
        assert len(gathered(pool, fields, verify="never")) == 5


def test_a_batch_of_some_is_checked_again_in_every_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "AGAIN", 5)
    pick, steps = pick_in_turn(40), range(5)
    order = pick(0, 5).slots
    with open_pool(tmp_path, PLAIN) as pool:
        gather = make_gather(pool, PLAIN, num_threads=0)
        try:
            [*gather.batches(pick, steps, epoch=0)]
            damaged, other = order[2, 3], order[4, 0]
            flip(pool, damaged)
            for epoch in (0, 1, 3, 4):
                [*gather.batches(pick, steps, epoch=epoch)]
            with pytest.raises(CorruptRowError, match=rf"slot {damaged} \(sample {damaged}\)"):
                [*gather.batches(pick, steps, epoch=7)]
            # What damaged it may have damaged others: all are looked at again.
            flip(pool, damaged)
            flip(pool, other)
            with pytest.raises(CorruptRowError, match=rf"slot {other} \(sample {other}\)"):
                [*gather.batches(pick, steps, epoch=7)]
        finally:
            gather.close()


@pytest.mark.parametrize("fields", KINDS, ids=lambda fields: "+".join(fields))
@pytest.mark.parametrize("damage", ["cut", "removed"])
def test_a_file_that_was_cut_or_removed_meanwhile_is_named_as_batches_begin(
    tmp_path, fields, damage
):
    """Touching what is gone of a mapped file would end the process without a word."""
    with open_pool(tmp_path, fields) as pool:
        gather = make_gather(pool, fields, num_threads=0)
        try:
            [*gather.batches(pick_in_turn(40), range(5), epoch=0)]
            path = next(
                pool.cache.directory.glob("fixed-*" if pool.cache.files.fixed else "heap-*")
            )
            content = path.read_bytes()
            # Put back in the same file: it is mapped, and this test goes on.
            if damage == "cut":
                os.truncate(path, 20)
            else:
                path.rename(path.with_name("away"))
            found = "is 20 bytes long" if damage == "cut" else "is not there any more"
            with pytest.raises(CacheError, match=rf"{path.name}: {found}.*start the job again"):
                next(gather.batches(pick_in_turn(40), range(5), epoch=1))
            if damage == "cut":
                path.write_bytes(content)
        finally:
            gather.close()


def test_a_row_is_checked_once_and_again_when_it_moved(tmp_path, monkeypatch):
    with open_pool(tmp_path, PLAIN) as pool:
        gather = make_gather(pool, PLAIN, num_threads=0)
        pick, steps = pick_in_turn(40), range(5)  # none of epoch 9 is checked anyway
        checked = []
        hashed = gather._verifier._corrupt

        def count(rows, slots, *where):
            checked.extend(slots[rows].tolist())
            return hashed(rows, slots, *where)

        monkeypatch.setattr(gather._verifier, "_corrupt", count)
        for _ in range(3):
            list(gather.batches(pick, steps, epoch=9))
        assert sorted(checked) == list(range(40))
        entries, other = pool.cache.entries, np.array([9])
        checked.clear()
        entries.checksum.put(other, entries.checksum[other] ^ np.uint64(1))
        gather.forget(other)
        with pytest.raises(CorruptRowError, match="slot 9"):
            list(gather.batches(pick, steps, epoch=1))
        assert checked == [9]
        gather.close()


def test_a_corrupt_row_is_repaired_once(tmp_path):
    asked = []
    with open_pool(tmp_path, PLAIN) as pool:
        good = gathered(pool, PLAIN)
        flip(pool, 5)
        flip(pool, 6, field=1)

        def repair(slots):
            asked.extend(slots.tolist())
            for slot, field in ((5, 0), (6, 1)):
                if slot in slots:
                    flip(pool, slot, field)

        gather = make_gather(pool, PLAIN, num_threads=0, repair=repair)
        assert_same(good, list(gather.batches(pick_in_turn(40), range(5), epoch=1)))
        assert_same(good, list(gather.batches(pick_in_turn(40), range(5), epoch=1)))
        gather.close()
    assert sorted(asked) == [5, 6]


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_row_that_stays_corrupt_becomes_padding_when_so_asked(tmp_path, num_threads):
    with open_pool(tmp_path, PLAIN) as pool:
        good = gathered(pool, PLAIN)
        flip(pool, 5)
        gather = make_gather(
            pool, PLAIN, num_threads=num_threads, on_error="skip", repair=lambda slots: None
        )
        batches = list(gather.batches(pick_in_turn(40), range(5), epoch=1))
        assert_same(batches, list(gather.batches(pick_in_turn(40), range(5), epoch=1)))
        gather.close()
    skipped = [int(i) for batch in batches for i in batch["sample_id"] if i == PADDING]
    assert len(skipped) == gather.num_skipped // 2 == 1
    for batch, before in zip(batches, good, strict=True):
        bad = before["sample_id"] == 5
        assert (batch["weight"] == (~bad).float()).all()
        assert (batch["slot"][bad] == PADDING).all()
        for name in PLAIN:
            assert torch.equal(batch[name][~bad], before[name][~bad])
            assert torch.isin(batch[name][bad], batch[name][~bad]).all(), "looks like a good row"


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("transform", [None, lambda sample, rng: sample | {"n": 1}])
def test_an_image_that_does_not_decode_is_an_error_or_padding(tmp_path, num_threads, transform):
    options = {"num_threads": num_threads, "transform": transform}
    with open_pool(tmp_path, broken=frozenset([3, 4])) as pool:
        with pytest.raises(FieldError, match=r"sample [34], field 'image'.*do not decode"):
            gathered(pool, **options)
        batches = gathered(pool, on_error="skip", **options)
        collated = gathered(pool, on_error="skip", collate=len, num_threads=num_threads)
    ids = [i for batch in batches for i in batch["sample_id"].tolist()]
    assert sorted(ids) == sorted([PADDING, PADDING, *({*range(40)} - {3, 4})])
    assert collated == [8] * 5


def test_what_is_ready_is_not_kept_back_by_an_item_that_cannot_begin_yet():
    begun, late = [], {2}

    def begin(work):
        begun.append(work)
        future: Future[int] = Future()
        future.set_result(work)
        return future

    made: Prefetcher[int, int] = Prefetcher(
        begin, iter([1, 2, 3, 4]), depth=2, timeout_s=1, may_wait=late.__contains__
    )
    items = iter(made)
    assert [next(items), begun] == [1, [1]]
    # With nothing under way it is begun all the same: it is what the caller waits for
    assert [next(items), begun] == [2, [1, 2, 3, 4]]
    assert [*items] == [3, 4]


def test_work_that_never_ends_is_an_error_after_a_while():
    waiting: Prefetcher[int, int] = Prefetcher(
        lambda work: Future(), iter([1]), depth=1, timeout_s=0.01
    )
    with pytest.raises(StallError, match=r"0 s.*py-spy"):
        next(iter(waiting))


def test_what_is_under_way_is_counted_while_it_is_taken_and_waited_for_after_a_ctrl_c():
    waited = []

    class UnderWay(Future[int]):
        def done(self) -> bool:
            return next(items) > 0  # as the loop's thread does while another one counts

        def result(self, timeout: float | None = None) -> int:
            if self is made[3]:
                raise KeyboardInterrupt
            return 1

        def exception(self, timeout: float | None = None) -> None:
            waited.append(self)

    made = [UnderWay() for _ in range(5)]
    under_way: Prefetcher[int, int] = Prefetcher(
        made.__getitem__, iter(range(5)), depth=4, timeout_s=1
    )
    items = iter(under_way)
    next(items)
    with pytest.raises(KeyboardInterrupt):
        under_way.ready  # noqa: B018
    under_way.close()
    assert waited == made[3:]


def test_a_fork_does_not_wait_for_threads_that_it_has_not(monkeypatch):
    future: Future[int] = Future()
    under_way: Prefetcher[int, int] = Prefetcher(
        lambda work: future, iter([1]), depth=1, timeout_s=0.01
    )
    with pytest.raises(StallError):
        next(iter(under_way))
    monkeypatch.setattr(future, "exception", lambda timeout: os._exit(3))
    child = os.fork()
    if not child:
        under_way.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_leaving_in_the_middle_stops_the_threads_work(tmp_path):
    made = []

    def note(sample, rng):
        made.append(int(sample["label"]))
        return sample

    with open_pool(tmp_path, PLAIN) as pool:
        gather = make_gather(pool, PLAIN, num_threads=2, transform=note, prefetch=1)
        next(gather.batches(pick_in_turn(40), range(5), epoch=0))
        gather.stop()
        assert gather.ready == 0
        before = len(made)
        assert before <= 3 * 8
        whole = list(gather.batches(pick_in_turn(40), range(5), epoch=0))
        assert len(whole) == 5
        assert len(made) == before + 40
        gather.close()


class UnreadableError(FieldError):
    def __init__(self, number: int, cause: str) -> None:
        super().__init__(f"{cause}: {number}")


@dataclass(frozen=True)
class Unreadable:
    """A field whose values never decode."""

    key: str

    def column(self, name: str) -> None:
        return None

    def encode(self, raw: Any, where: str) -> bytes:
        return bytes(raw)

    def decode(self, data: memoryview, where: str) -> object:
        raise UnreadableError(7, "unreadable")


@pytest.mark.parametrize("num_threads", [0, 2])
def test_an_error_of_a_users_own_class_names_its_sample_too(tmp_path, num_threads):
    fields: Mapping[str, Field] = {"data": Unreadable("bin"), "label": Int("cls")}
    with open_pool(tmp_path, fields) as pool:
        with pytest.raises(FieldError, match=r"kinds-40.*: unreadable: 7"):
            gathered(pool, fields, num_threads=num_threads)

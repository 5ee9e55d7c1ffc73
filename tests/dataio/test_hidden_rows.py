"""Hidden rows cost nothing in training: not read, not decoded, not delivered. Counted."""

import re
import statistics
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

import dataio.batch.feed
import dataio.batch.fill
import dataio.batch.lookup
import dataio.rows.decode
from dataio import Image, Int, Loader, NodeCache, Reports, Workers
from dataio.batch.job import BatchWork
from dataio.batch.process_transform import WorkerArguments, WorkerRows, make_assembler
from dataio.rows.fields import Field
from dataio.store.files.fetch import Fetcher
from dataio.store.files.reader import RowReader, locate
from dataio.world import run_threads, single_world, thread_worlds
from importance import Kakurenbo
from shuffle import Partial
from tests.cases import diagonal
from tests.dataio.batch.gather_pool import FIELDS as KIND_FIELDS
from tests.dataio.batch.gather_pool import EveryKind, pick_in_turn
from tests.dataio.batch.gather_pool import open_pool as open_kinds
from tests.dataio.hidden_pool import FRACTION, KAKURENBO, PRUNE, HiddenCase, one_node, report_losses
from tests.dataio.hidden_pool import two_nodes as two_nodes_read
from tests.dataio.loaders import loss_of
from tests.dataio.store.test_quota import KINDS, LargeShards
from tests.opened import make_gather

NUM_SAMPLES = 48
IMAGES: dict[str, Field] = {"image": Image("png"), "label": Int("label")}
REFRESHED = Kakurenbo(0.3, drops=(), alphas=(1.0,), warmup_epochs=0)
POLICIES = [PRUNE, REFRESHED]


@pytest.fixture
def touched(monkeypatch):
    """The samples whose rows are looked up, checked, decoded and copied to a device."""
    seen: dict[str, list[int]] = {"read": [], "checked": [], "decoded": [], "delivered": []}
    checksums = RowReader.checksums
    decode, each = dataio.rows.decode.decode_image, dataio.batch.feed._each

    def located(entries, slots):
        found = locate(entries, slots)
        seen["read"] += found.sample_id.ravel().tolist()
        return found

    def checked(self, rows):
        seen["checked"] += rows.sample_id.tolist()
        return checksums(self, rows)

    def decoded(data, out, how, draws, *, where):
        seen["decoded"].append(int(re.findall(r"sample (\d+)", where)[0]))
        decode(data, out, how, draws, where=where)

    def delivered(batch, device, **options):
        seen["delivered"] += batch["sample_id"].tolist()
        return each(batch, device, **options)

    monkeypatch.setattr(dataio.batch.lookup, "locate", located)
    monkeypatch.setattr(RowReader, "checksums", checked)
    monkeypatch.setattr(dataio.batch.fill, "decode_image", decoded)
    monkeypatch.setattr(dataio.batch.feed, "_each", delivered)
    return seen


@diagonal(policy=POLICIES, num_threads=[0, 2])
def test_hidden_rows_are_not_read_decoded_or_delivered_for_training(
    tmp_path, touched, policy, num_threads
):
    with Loader(
        EveryKind(NUM_SAMPLES), cache=NodeCache(tmp_path, verify="always"), batch_size=4,
        fields=IMAGES, importance=policy,
        device="meta", world=single_world(), workers=Workers(threads=num_threads),
        reports=Reports(progress=False),
    ) as loader:  # fmt: skip
        hides = []
        for epoch in loader.epochs(4):
            for ids in touched.values():
                ids.clear()
            hidden = set(
                loader._session.pool.sample_ids[loader._run.running.plan.selection.hidden].tolist()
            )
            hides.append(len(hidden))
            list(loader)
            for what, ids in touched.items():
                visible = set(range(NUM_SAMPLES)) - hidden
                assert set(ids) - {-1} == visible, f"{what} in epoch {epoch}"
            report(loader, epoch)
            touched["delivered"].clear()
            list(loader.refresh())
            due = hidden if policy is REFRESHED else set()
            assert set(touched["delivered"]) - {-1} == due, "a refresh is what reads them"
        most = 14 if policy is PRUNE else 12  # topped up to full steps
        assert max(hides) == most


def report(loader, epoch):
    """Report all rows, as training them would, from outside of what is counted."""
    scores, ids = loader._session.pool.scores, loader._session.pool.sample_ids
    if "loss" in scores.dtype.names:
        scores["loss"], scores["epoch"] = ids * 7 % 48, epoch
        scores["correct"], scores["confidence"] = True, 1
        loader._session.feedback.num_rows = NUM_SAMPLES


@diagonal(kind=["fixed", "both"], policy=POLICIES)
def test_under_a_quota_the_source_is_not_asked_for_hidden_rows(tmp_path, kind, policy):
    def on_rank(world):
        source = LargeShards()
        with Loader(
            source, cache=NodeCache(tmp_path, quota=400_000), world=world, batch_size=6,
            fields=KINDS[kind], seed=3,
            workers=Workers(threads=1), importance=policy, reports=Reports(progress=False),
        ) as loader:  # fmt: skip
            ends = []
            resident = loader._session.pool.cache.entries.present.copy()
            for epoch in loader.epochs(4):
                source.rows_read.clear()
                selection = loader._run.running.plan.selection
                ids = loader._session.pool.sample_ids.copy()
                away = set(ids[~resident].tolist())
                hidden = set(ids[selection.hidden].tolist())
                trained = set()
                for batch in loader:
                    loader.report(batch, *loss_of(batch["sample_id"], epoch))
                    trained |= set(batch["sample_id"].tolist()) - {-1}
                ends.append((set(source.rows_read), trained & away, hidden & away))
            return ends

    for ends in run_threads(thread_worlds([1, 1], timeout_s=20), on_rank):
        for read, wanted, spared in ends:
            assert read == wanted, "every visible row that does not stay, and no other"
            assert not read & spared
        assert sum(len(spared) for _, _, spared in ends) > 20


def open_case(tmp_path, *, fixed=True):
    """A pool on a disk whose bytes the kernel counts, and what an epoch of all rows reads."""
    case = HiddenCase(48 << 10, fixed, 320 * 48 << 10)  # full batches, with 96 rows hidden or none
    one_node(case, tmp_path / "one", None, None)
    with patch("dataio.store.cache.exceeds_memory", lambda *_, **__: True):
        full = one_node(case, tmp_path / "one", None, None)
    if not 0.95 * case.pool_bytes < full.disk_bytes < 1.1 * case.pool_bytes:
        pytest.skip(f"{tmp_path} is in memory, or not counted: {full} of {case}")
    return case, full


@pytest.mark.parametrize("policy", [PRUNE, KAKURENBO])
def test_the_disk_gives_as_much_less_as_rows_are_hidden(tmp_path, policy):
    case, full = open_case(tmp_path)
    saved = tmp_path / "saved" if policy is KAKURENBO else None
    if saved is not None:
        report_losses(case, tmp_path / "one", saved)
    with patch("dataio.store.cache.exceeds_memory", lambda *_, **__: True):
        reads = [one_node(case, tmp_path / "one", saved, policy) for _ in range(3)]
    assert all(read.trained_bytes < 0.72 * full.trained_bytes for read in reads)
    ratio = statistics.median(read.disk_bytes for read in reads) / full.disk_bytes
    assert abs(ratio - (1 - FRACTION)) < 0.02


@pytest.mark.parametrize("fixed", [True, False])
def test_an_exchange_reads_no_hidden_row_but_those_that_leave(tmp_path, fixed):
    case, full = open_case(tmp_path, fixed=fixed)
    shuffle = Partial(0.1)
    two_nodes_read(case, tmp_path / "two", PRUNE, shuffle)
    with patch("dataio.store.cache.exceeds_memory", lambda *_, **__: True):
        reads = [two_nodes_read(case, tmp_path / "two", PRUNE, shuffle) for _ in range(3)]
    ratio = statistics.median(read.disk_bytes for read in reads) / (2 * full.disk_bytes)
    assert abs(ratio - (1 - FRACTION + 0.1 * FRACTION)) < 0.02


def test_a_page_that_is_touched_is_read_alone_beyond_memory(tmp_path):
    """Short rows are copied from mapped pages, and rows that arrive are written there."""
    with (
        open_kinds(tmp_path, num_leaving=4) as pool,
        patch("dataio.store.cache.exceeds_memory", lambda *_, **__: True),
    ):
        gather = make_gather(pool, KIND_FIELDS, num_threads=0)
        assert not read_at_random(tmp_path)
        next(gather.batches(pick_in_turn(40), range(5), epoch=0))
        alone = {"fixed-0.npy", "fixed-1.npy", "heap-0.bin"}
        assert read_at_random(tmp_path) == alone
        for file in pool.cache.files.fixed:
            file.map()  # as after it grew
        assert read_at_random(tmp_path) == alone
        gather.close()


@pytest.mark.parametrize("beyond_memory", [True, False])
def test_a_process_that_decodes_fetches_its_rows_too_beyond_memory(
    tmp_path, monkeypatch, beyond_memory
):
    with open_kinds(tmp_path) as pool:
        cache = pool.cache
        paths = tuple(file.path for file in cache.files.fixed)
        for_workers = WorkerArguments(
            cache.schema, cache.directory, paths, KIND_FIELDS, None, False, 0, "raise"
        )
        located = locate(cache.entries, np.arange(8))
        here = make_assembler(
            for_workers, RowReader(cache.schema, cache.files.fixed, cache.directory)
        )
        small = here.filler.gather_small(located.position)
        job = here.prepare(BatchWork(0, 0, located, small))
        here.run(job, 0, 8)
        fetched, fetch = [], Fetcher.fetch

        def note(fetcher, located, *others):
            fetched.append(located)
            return fetch(fetcher, located, *others)

        monkeypatch.setattr(Fetcher, "fetch", note)
        rows = WorkerRows(for_workers)
        with patch("dataio.batch.process_transform.exceeds_memory", lambda *_, **__: beyond_memory):
            made = rows[BatchWork(0, 0, located, small)]
        assert made.failure is None
        assert made.values is not None
        image = np.asarray(made.values["image"]).transpose(0, 3, 1, 2)
        assert np.array_equal(image, here.finish(job)["image"])
        assert bool(fetched) == beyond_memory


def read_at_random(root: Path) -> set[str]:
    """Mapped files below ``root`` that the kernel was told to read page by page."""
    found, name = set(), ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("VmFlags:"):
            if f"{root}/" in name and "rr" in line.split():
                found.add(Path(name).name)
        elif not line.split()[0].endswith(":"):
            name = line.split(maxsplit=5)[-1]
    return found

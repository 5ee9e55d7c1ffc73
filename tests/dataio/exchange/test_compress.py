"""Parcels that are compressed bring the same rows, in fewer bytes, and only where it pays."""

from types import SimpleNamespace

import numpy as np
import pytest

from dataio.base.errors import ExchangeError
from dataio.exchange import carrier, compress
from dataio.exchange.transfer import Transfer
from dataio.rows.parcel import Parcel, ParcelBuffers
from dataio.world import run_threads, thread_worlds
from shuffle import Partial
from tests.dataio.exchange.rings import DRIVERS, ROWS, row_bytes
from tests.dataio.loaders import make
from tests.memory_source import MemorySource
from tests.row_store import MemoryStore

SEGMENT = 512


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch):
    monkeypatch.setattr(carrier, "SEGMENT_BYTES", SEGMENT)
    monkeypatch.setattr(carrier, "LEAST_BYTES", SEGMENT)
    monkeypatch.setattr(compress, "RATE_BYTES", 1)


def swap(world, *, how, damage=None, **given):
    """All rows of two ranks change places, in one parcel each; what arrived, and figures."""
    if damage is not None:
        send = world.isend
        world.isend = lambda data, **to: send(damage(data) if world.rank == 0 else data, **to)
    store = MemoryStore(ROWS * world.rank, ROWS)
    everything = [Parcel(np.arange(ROWS), 1 - world.rank, 0, 0)]
    transfer = Transfer(world, store, sends=everything, receives=everything, compress=how, **given)
    return store.arrived, transfer.finish(None)


@pytest.mark.parametrize("driver", DRIVERS)
def test_compressed_rows_arrive_as_they_were(driver):
    def run(world):
        return swap(world, how="zstd", threaded=DRIVERS[driver][world.rank])

    for rank, (arrived, figures) in enumerate(run_threads(thread_worlds([1, 1]), run)):
        first = ROWS * (1 - rank)
        assert arrived == {slot: (first + slot, row_bytes(first + slot)) for slot in range(ROWS)}
        assert figures["sent_bytes"] < 0.7 * figures["raw_bytes"]


def test_rows_that_do_not_get_smaller_go_as_they_are(monkeypatch):
    def noise(sample_id):
        return np.random.default_rng(sample_id).bytes(400)

    monkeypatch.setattr(MemorySource, "payload", staticmethod(noise))
    for arrived, figures in run_threads(thread_worlds([1, 1]), lambda w: swap(w, how="zstd")):
        assert [data[8:] for _, data in arrived.values()] == [noise(i) for i, _ in arrived.values()]
        # The columns of numbers ahead of the noise do.
        assert 0.9 < figures["sent_bytes"] / figures["raw_bytes"] <= 1


@pytest.mark.parametrize(("bytes_per_s", "pays"), [([], False), ([1e15], False), ([1e15, 1], False),
                                                   ([1.0, 2.0], True)])  # fmt: skip
def test_auto_compresses_where_the_link_was_slow(bytes_per_s, pays):
    def run(world):
        buffers = ParcelBuffers()
        buffers.sent_bytes_per_s.extend(bytes_per_s)
        found = swap(world, how="auto", buffers=buffers)
        assert len(buffers.sent_bytes_per_s) == len(bytes_per_s) + 1
        return found

    for _, figures in run_threads(thread_worlds([1, 1]), run):
        assert (figures["sent_bytes"] < figures["raw_bytes"]) == pays


def damaged_frame(data):
    if data[:4].tobytes() == b"\x28\xb5\x2f\xfd":
        data = data.copy()
        data[4:] ^= 255
    return data


def damaged_length(data):
    lengths = data.view(np.int64) if len(data) % 8 == 0 else data
    is_ahead = len(lengths) < 10 and 0 < lengths.max() <= SEGMENT
    return np.full(len(lengths), 1 << 40).view(np.uint8) if is_ahead else data


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damaged_frame, "cannot be unpacked .*restart"),
        (damaged_length, "length of a segment: found"),
    ],
)
def test_a_damaged_message_is_an_error_that_says_what_to_do(damage, words):
    with pytest.raises(ExchangeError, match=words):
        run_threads(thread_worlds([1, 1]), lambda w: swap(w, how="zstd", damage=damage))


def test_a_pyarrow_without_the_codec_is_refused_before_anything_is_staged(monkeypatch, tmp_path):
    lacks = SimpleNamespace(is_available=lambda name: False)
    monkeypatch.setattr(compress, "pa", SimpleNamespace(Codec=lacks, __version__="26"))
    monkeypatch.setattr(MemorySource, "read", None)
    with pytest.raises(ValueError, match=r'compress is "auto", but pyarrow 26 .*zstd.*; install'):
        run_threads(thread_worlds([1, 1]), lambda w: make(w, tmp_path, compress="auto"))
    assert not list(tmp_path.rglob("*.npy"))


def test_checkpoints_know_a_policy_without_how_its_parcels_go():
    assert repr(Partial(0.1, compress="zstd")) == repr(Partial(0.1))

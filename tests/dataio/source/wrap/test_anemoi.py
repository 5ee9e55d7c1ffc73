"""Datasets of anemoi: which dates are a sample, and how often a date is read."""

import os
from dataclasses import replace

import numpy as np
import pytest

from dataio import Anemoi, Array, FieldError, Loader, SourceError
from dataio.source.wrap import anemoi as module
from tests.cases import diagonal

zarr = pytest.importorskip("zarr", minversion="3", reason="needs Python 3.11: tonari[zarr]")
from examples.anemoi_data import MISSING, VARIABLES, write_dataset  # noqa: E402


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("anemoi") / "weather.zarr"
    return path, *write_dataset(path, num_points=2000)


class Opened:
    """Stands for what `anemoi.datasets.open_dataset` returns; notes which dates are read."""

    def __init__(self, path, values):
        self.facts, self.values, self.read = Anemoi(path).facts, values, []

    def __getattr__(self, name):
        return getattr(self.facts, name)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, dates):
        assert not {*range(*dates.indices(len(self)))} & {*MISSING}, "anemoi raises here"
        self.read += range(*dates.indices(len(self)))
        return self.values[dates]


def read_all(anemoi, source=None):
    """Read every sample in one go: float32[samples, offsets, ensemble, grid, variable]."""
    source = source or anemoi.open()
    blocks = [*source.read(np.arange(source.num_samples), anemoi.fields)]
    assert np.concatenate([rows.sample_id for rows in blocks]).tolist() == [
        *range(source.num_samples)
    ]
    values = np.concatenate([rows.fixed[0] for rows in blocks]).view(np.float32)
    return values.reshape(-1, *anemoi.fields["data"].shape)


@pytest.mark.usefixtures("zarr_reader")
@diagonal(
    offsets=[range(1), range(3), (0, 1, 4)],
    stride=[1, 3],
    period=[(None, None), ("2020-01-03T06:00", "2020-01-12"), (2020, "2020-01")],
    block_bytes=[1, 8 << 20],
)
def test_a_sample_is_its_dates_and_every_one_without_a_missing_date_is_there(
    offsets, stride, period, block_bytes, written, monkeypatch
):
    monkeypatch.setattr(module, "BLOCK_BYTES", block_bytes)
    path, values, dates = written
    variables, (start, end) = ["msl", "10u"] if period[1] == "2020-01-12" else None, period
    anemoi = Anemoi(path, offsets=offsets, stride=stride, start=start, end=end, variables=variables)
    there = {*range(*((9, 48) if variables else (0, len(dates))))} - {*MISSING}
    firsts = [at for at in range(len(dates)) if {at + offset for offset in offsets} <= there]
    firsts = [at for at in firsts if (at - firsts[0]) % stride == 0]
    expected = np.array([[at + offset for offset in offsets] for at in firsts])
    assert np.array_equal(anemoi.dates, dates[expected])
    columns = [VARIABLES.index(name) for name in variables or VARIABLES]
    # [samples, offsets, ensemble, grid, variable]
    assert np.array_equal(
        read_all(anemoi), values[expected][:, :, columns].transpose(0, 1, 3, 4, 2)
    )
    assert np.array_equal(anemoi.statistics["mean"], values.mean(axis=(0, 2, 3))[columns])


@diagonal(offsets=[range(1), range(4), (0, 2)], block_bytes=[1, 8 << 20])
def test_each_date_is_read_once_however_many_samples_have_it(
    offsets, block_bytes, written, monkeypatch
):
    monkeypatch.setattr(module, "BLOCK_BYTES", block_bytes)
    path, values, _ = written
    opened, needed = Opened(path, values), {*range(len(values))} - {*MISSING}
    anemoi = Anemoi(opened, offsets=offsets, variables=["2t"])
    expected = np.moveaxis(values[:, [1]], 1, -1)
    places = anemoi.firsts[:, None] + np.array(offsets)
    assert np.array_equal(read_all(anemoi), expected[places])
    assert sorted(opened.read) == sorted(needed & {*places.ravel().tolist()})
    # Half of the samples, as a node of two has them.
    opened.read.clear()
    half = [*anemoi.open().read(np.arange(len(places) // 2), anemoi.fields)]
    assert sum(map(len, half)) == len(places) // 2
    assert sorted(opened.read) == sorted({*places[: len(places) // 2].ravel().tolist()})
    # Of a store too, by bytes: what a sample of one date reads of it, and the same metadata.
    one, more = (Anemoi(path, offsets=range(n), end="2020-01-03T00:00") for n in (1, 4))
    totals = []
    for anemoi in (one, more):
        source = anemoi.open()
        before = source.bytes_read
        read_all(anemoi, source)
        totals.append(source.bytes_read - before)
    assert totals[0] == totals[1] > 0


def test_the_first_epoch_reads_the_dataset_once_and_later_ones_nothing(written, tmp_path):
    path, *_ = written
    data_bytes = sum(file.stat().st_size for file in (path / "data").iterdir())
    anemoi = Anemoi(path, offsets=range(3))
    with Loader(anemoi, fields=anemoi.fields, batch_size=4, cache=tmp_path) as loader:
        read = []
        for _ in loader.epochs(2):
            batches = [*loader]
            read.append(loader.stats()["source_bytes"])
    assert len(batches[0]["data"]) == 4
    assert data_bytes < read[0] < 1.2 * data_bytes
    assert read[1] == read[0]


@pytest.mark.filterwarnings("default")
def test_the_same_dates_in_a_store_and_as_opened(written):
    path, *_ = written
    opened = pytest.importorskip("anemoi.datasets", reason="needs anemoi-datasets").open_dataset
    ours = Anemoi(path, offsets=(0, 2), variables=["msl"], start="2020-01-02", end="2020-01-09")
    theirs = Anemoi(
        opened(str(path), select=["msl"], start="2020-01-02", end="2020-01-09"), offsets=(0, 2)
    )
    assert np.array_equal(ours.dates, theirs.dates)
    assert np.array_equal(read_all(ours), read_all(theirs))
    assert ours.statistics.keys() == theirs.statistics.keys()


def test_caches_of_other_dates_variables_or_values_are_others(written, tmp_path):
    base = Anemoi(tmp_path / "a.zarr", offsets=(0, 1))
    values, _ = write_dataset(tmp_path / "a.zarr")
    sources = [
        base, replace(base, offsets=(0, 2)), replace(base, variables=["msl"]),
        replace(base, end="2020-01-09"), Anemoi(Opened(base.dataset, values)),
    ]  # fmt: skip
    names = [anemoi.open().name for anemoi in sources]
    assert len({*names}) == len(names)
    known = base.open().fingerprint
    assert replace(base).open().fingerprint == known
    os.utime(tmp_path / "a.zarr/data/3.0.0.0", ns=(1, 1))
    assert replace(base).open().fingerprint != known
    assert base.open().place_of(0) == (
        f"{tmp_path}/a.zarr[2020-01-01T00:00:00, 2020-01-01T06:00:00]"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"offsets": (1, 2)}, r"offsets is \[1, 2\] and stride 1, .* ascend from 0"),
        ({"offsets": ()}, r"offsets is \[\] and stride 1"),
        ({"stride": 0}, r"stride 0, .* >= 1"),
        ({"variables": ["t2m"]}, r"variables names t2m, expected some of 10u, 2t, msl; correct"),
        ({"start": "soon"}, r"start is 'soon', expected a date such as 2020"),
        ({"start": 2021}, r"none of 60 dates, .* from 2021 to None, .*: check start and end"),
        ({"offsets": range(70)}, r"none of 60 dates"),
    ],
)
def test_what_asks_for_no_sample_is_refused(given, message, written):
    with pytest.raises((ValueError, SourceError), match=message):
        Anemoi(written[0], **given).open()


def test_stores_and_fields_that_are_not_those_of_anemoi_are_refused(tmp_path):
    write_dataset(tmp_path / "a.zarr")
    wrong = {"t": Array("2t", (2, 1, 256, 3), "float32")}
    with pytest.raises(
        FieldError, match=r"has the key 'data' alone, .*; give fields=anemoi.fields"
    ):
        Anemoi(tmp_path / "a.zarr").open().read(np.arange(1), wrong)
    group = zarr.open_group(tmp_path / "a.zarr")
    group["dates"][3] = np.datetime64("2020-01-01T19:00")
    with pytest.raises(SourceError, match="dates are not evenly spaced"):
        Anemoi(tmp_path / "a.zarr").open()
    for lacks in ("mean", "variables"):
        write_dataset(tmp_path / "a.zarr")
        group = zarr.open_group(tmp_path / "a.zarr")
        del (group if lacks == "mean" else group.attrs)[lacks]
        with pytest.raises(SourceError, match=r"a.zarr: holds .*, expected the arrays data \[time"):
            Anemoi(tmp_path / "a.zarr").open()

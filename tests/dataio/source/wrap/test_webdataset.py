"""A pipeline of webdataset, handed to a loader: its samples, whoever reads which shard."""

import gc
import io
import warnings
from functools import partial

import numpy as np
import pytest
from PIL import Image

from dataio import Array, Bytes, Field, Int, Loader, Reports, Shards, SourceError, Staging, Workers
from dataio.source import StorageFile, open_source
from dataio.source.wrap.webdataset import PipelineFormat
from dataio.world import run_threads, single_world, thread_worlds

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    wds = pytest.importorskip("webdataset")

SHARDS, ROWS = 5, 7
FIELDS: dict[str, Field] = {"pixels": Array("pixels", (4, 5, 3), "uint8"), "label": Int("label")}


def color(label):
    return np.full((4, 5, 3), label, np.uint8)


@pytest.fixture
def urls(tmp_path):
    for shard in range(SHARDS):
        with wds.TarWriter(str(tmp_path / f"train-{shard}.tar")) as writer:
            for row in range(ROWS):
                label, image = shard * ROWS + row, io.BytesIO()
                Image.fromarray(color(label)).save(image, "png")
                sample = {"__key__": f"{label:04}", "png": image.getvalue(), "cls": str(label)}
                writer.write(sample)
    return str(tmp_path / f"train-{{0..{SHARDS - 1}}}.tar")


def to_fields(sample):
    return {"pixels": np.asarray(sample["png"]), "label": sample["cls"]}


def is_even(sample):
    return sample["cls"] % 2 == 0


def in_second_shard(sample):
    return ROWS <= sample["cls"] < 2 * ROWS


def below(sample, most):
    return sample["label"] < most


def dataset(urls, **options):
    return wds.WebDataset(urls, **({"shardshuffle": False, "empty_check": False} | options))


def decoded(urls, **options):
    return dataset(urls, **options).decode("pil").map(to_fields)


def iterated(pipeline):
    """What webdataset itself gives; it leaves the files to be closed by the garbage collector."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        samples = list(pipeline)
        gc.collect()
    return samples


def read(source, ids=None, fields=FIELDS):
    ids = np.arange(source.num_samples) if ids is None else np.array(ids)
    return [row for rows in source.read(ids, fields) for row in rows.sample_id.tolist()]


def trained(pipeline, root, world, **options):
    """The labels of two epochs, and whether each came with its own pixels."""
    with Loader(
        pipeline, batch_size=3, fields=FIELDS, cache=root, world=world,
        workers=Workers(threads=0), reports=Reports(progress=False), **options,
    ) as loader:  # fmt: skip
        epochs = []
        for _ in loader.epochs(2):
            labels = []
            for batch in loader:
                for row in np.flatnonzero(batch["weight"].numpy() > 0):
                    labels.append(int(batch["label"][row]))
                    assert (batch["pixels"][row].numpy() == color(labels[-1])).all()
            epochs.append(labels)
        return epochs, loader.stats()


@pytest.mark.parametrize("nodes", [[1], [2], [1, 2]])
@pytest.mark.parametrize("readers", [1, 3])
def test_a_pipeline_is_trained_as_iterating_it_gives_it(tmp_path, urls, nodes, readers):
    pipeline = decoded(urls)
    expected = sorted(sample["label"] for sample in iterated(pipeline))
    worlds = [single_world()] if nodes == [1] else thread_worlds(nodes)
    staging = Staging(readers=readers)
    ranks = run_threads(
        worlds, lambda world: trained(pipeline, tmp_path / "cache", world, staging=staging)
    )
    for epoch in range(2):
        assert sorted(label for epochs, _ in ranks for label in epochs[epoch]) == expected


def test_ids_follow_the_order_of_the_shards_whatever_shuffles(tmp_path, urls):
    plain = open_source(decoded(urls))
    shuffled = dataset(urls, shardshuffle=3, seed=1).shuffle(100).decode("pil").map(to_fields)
    rows = [
        [column.tobytes() for part in source.read(np.arange(35), FIELDS) for column in part.fixed]
        for source in (plain, open_source(shuffled))
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("choose", "count"), [(is_even, 18), (in_second_shard, 7)], ids=["some", "one shard"]
)
def test_a_filter_is_counted(tmp_path, urls, choose, count):
    pipeline = dataset(urls).decode("pil").select(choose).map(to_fields)
    expected = sorted(sample["label"] for sample in iterated(pipeline))
    assert len(expected) == count
    source = open_source(pipeline)
    assert source.num_samples == count
    assert read(source) == list(range(count))
    ranks = run_threads(
        thread_worlds([1, 1]), lambda world: trained(pipeline, tmp_path / "cache", world)
    )
    assert sorted(label for epochs, _ in ranks for label in epochs[1]) == expected


def test_a_filter_that_leaves_nothing_is_named(urls):
    pipeline = dataset(urls).decode("pil").select(lambda sample: False)
    with pytest.raises(SourceError, match=r"gives no sample of 5 shards.*check its filters"):
        open_source(pipeline)


def test_tuples_are_read_by_position_and_raw_bytes_as_they_are(urls):
    fields: dict[str, Field] = {"label": Int("1"), "png": Bytes("0")}
    pairs = open_source(dataset(urls).to_tuple("png", "cls"))
    assert read(pairs, [0, 8, 34], fields) == [0, 8, 34]


def test_a_pipeline_of_stages_is_taken_too(urls):
    stages = wds.DataPipeline(
        wds.SimpleShardList(urls), wds.split_by_node, wds.split_by_worker,
        wds.tarfile_to_samples(), wds.shuffle(10), wds.decode("pil"), wds.map(to_fields),
    )  # fmt: skip
    assert read(open_source(stages)) == list(range(SHARDS * ROWS))


def test_what_opens_takes_apart_and_groups_keeps_its_settings(urls):
    """Given by position or by name."""
    stop = wds.warn_and_stop
    for stage in (wds.tarfile_to_samples(stop), wds.tarfile_to_samples(handler=stop)):
        pipeline = wds.DataPipeline(wds.SimpleShardList(urls), stage, wds.decode("pil"))
        expander, grouper = PipelineFormat(pipeline)._stages[:2]
        assert stop in (*expander.args, *expander.kw.values())
        assert grouper.kw == {"handler": stop}


def test_a_second_start_opens_no_shard(tmp_path, urls):
    first = trained(decoded(urls), tmp_path / "cache", single_world())
    again = trained(decoded(urls), tmp_path / "cache", single_world())
    assert again[0] == first[0]
    assert first[1]["source_bytes"] > 0
    assert again[1]["source_bytes"] == 0


def test_another_function_or_version_is_another_dataset(urls):
    def brighter(sample):
        return {"pixels": np.asarray(sample["png"]) + 1, "label": sample["cls"]}

    one, same = open_source(decoded(urls)), open_source(decoded(urls))
    other = open_source(dataset(urls).decode("pil").map(brighter))
    versioned = open_source(decoded(urls), version="2")
    # What a stage holds counts as its code does: a decoder's own settings, and a partial's.
    gray = open_source(dataset(urls).decode("l8").map(to_fields))
    colored = open_source(dataset(urls).decode("rgb8").map(to_fields))
    halves = [open_source(decoded(urls).select(partial(below, most=most))) for most in (9, 20)]
    assert one.fingerprint == same.fingerprint
    sources = [one, other, versioned, gray, colored, *halves]
    assert len({source.fingerprint for source in sources}) == len(sources)


def test_bytes_are_counted_and_limits_are_those_of_the_shards(tmp_path, urls):
    size = sum(path.stat().st_size for path in tmp_path.glob("train-*.tar"))
    source = open_source(decoded(urls))
    assert 0 < source.bytes_read <= size
    _, stats = trained(Shards(decoded(urls)), tmp_path / "cache", single_world())
    assert stats["source_bytes"] > 0


def no_sample(sample):
    raise ArithmeticError("one too many")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda urls: dataset(urls, resampled=True), "begins with ResampledShards?.*without resam"),
        (lambda urls: dataset(urls).with_epoch(10), r"repeats its samples \(with_epoch, repeat\)"),
        (lambda urls: dataset(urls).repeat(2), "repeats its samples"),
        (lambda urls: dataset(urls).rsample(0.5), r"stage rsample, .*choose samples with .select"),
        (lambda urls: dataset(urls).batched(4), "stage batched, .*the loader makes batches"),
        (lambda urls: dataset(urls).slice(10), "choose shards or samples by their names"),
        (lambda urls: wds.DataPipeline(wds.SimpleShardList(urls)), "no stage .* opens its shards"),
        (lambda urls: dataset(urls).map(no_sample), r"train-0.tar: sample 0 failed .*one too many"),
    ],
)
def test_what_has_no_place_in_a_loader_is_named_with_its_cure(urls, make, message):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = make(urls)
    with pytest.raises(SourceError, match=message):
        open_source(pipeline)


@pytest.mark.parametrize("handler", ["reraise_exception", "ignore_and_continue"])
def test_a_shard_that_vanishes_or_changes_is_named_though_the_pipeline_passes_over_errors(
    tmp_path, urls, handler
):
    source = open_source(decoded(urls, handler=getattr(wds, handler)))
    path = tmp_path / "train-2.tar"
    path.write_bytes(path.read_bytes()[:-512])
    with pytest.raises(SourceError, match=r"train-2\.tar"):
        read(source)


def test_what_the_storage_says_is_said_though_the_pipeline_passes_over_errors(monkeypatch, urls):
    source = open_source(decoded(urls, handler=wds.ignore_and_continue))
    read_at = StorageFile.read_at

    def broken(self, offset, length):
        if self.path.endswith("train-2.tar"):
            raise SourceError(f"{self.path}: the server is gone")
        return read_at(self, offset, length)

    monkeypatch.setattr(StorageFile, "read_at", broken)
    with pytest.raises(SourceError, match="the server is gone"):
        read(source)
    with pytest.raises(SourceError, match="the server is gone"):
        open_source(decoded(urls, handler=wds.ignore_and_continue))


def test_a_cut_shard_is_named(tmp_path, urls):
    path = tmp_path / "train-3.tar"
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(SourceError, match=r"train-3\.tar: sample 0 failed in the pipeline"):
        open_source(decoded(urls))


def test_samples_that_come_and_go_are_named(urls):
    calls = iter(range(1000))

    def at_first(sample):
        return next(calls) < SHARDS * ROWS

    source = open_source(dataset(urls).decode("pil").select(at_first).map(to_fields))
    with pytest.raises(SourceError, match="gave fewer than the 7 samples that were counted before"):
        read(source)

"""An evaluation with transforms and fields of its own."""

import numpy as np
import pytest
import torch

from dataio import Bytes, FieldError, Int, Workers
from dataio.world import run_threads, single_world, thread_worlds
from tests.dataio.loaders import jitter, make
from tests.memory_source import MemorySource, payload


def measure(sample, rng):
    return {"length": len(sample["data"]), "noise": rng.random(2), "label": sample["label"]}


def mark(batch, rng):
    return batch | {"draws": torch.from_numpy(rng.integers(0, 100, len(batch["slot"])))}


def lengths(samples):
    return {"longest": torch.tensor(max(len(sample["data"]) for sample in samples))}


def seen(evaluation):
    """What two passes deliver, by sample."""
    passes = []
    for _ in range(2):
        rows = {}
        for batch in evaluation:
            for row in torch.flatten(batch["valid"].nonzero()).tolist():
                values = {name: np.asarray(batch[name][row]).tolist() for name in batch}
                rows[values.pop("sample_id")] = values
        passes.append(rows)
    assert passes[0] == passes[1], "each pass is the same"
    return passes[0]


@pytest.mark.parametrize(
    "workers", [Workers(threads=0), Workers(threads=2), Workers(processes=1)], ids=str
)
def test_its_transforms_are_not_those_of_training(tmp_path, workers):
    options = {"transform": jitter, "workers": workers}
    with make(single_world(), tmp_path, **options) as loader:
        plain = loader.evaluation(MemorySource(23, name="other"))
        assert {frozenset(batch) for batch in plain} == {
            frozenset(["label", "data", "weight", "sample_id", "slot", "valid"])
        }
        rows = seen(
            loader.evaluation(
                MemorySource(23, name="other"), transform=measure, batch_transform=mark
            )
        )
        assert {frozenset(batch) for batch in loader} == {
            frozenset(["label", "data", "noise", "weight", "sample_id", "slot"])
        }
    assert sorted(rows) == list(range(23))
    for i, row in rows.items():
        assert row["length"] == len(payload(i))
        assert row["label"] == i % 10
    assert len({tuple(row["noise"]) for row in rows.values()}) == 23


def test_it_is_the_same_on_every_number_of_ranks(tmp_path):
    def run(world, name="both"):
        with make(world, tmp_path / name) as loader:
            return seen(loader.evaluation(MemorySource(23, name="other"), transform=measure))

    noise = [
        {i: row["noise"] for i, row in (one | other).items()}
        for one, other in (
            run_threads(thread_worlds([1, 1]), run),
            (run(single_world(), "alone"), {}),
        )
    ]
    assert noise[0] == noise[1]


def test_it_has_all_samples_on_the_caches_of_other_ranks(tmp_path):
    def rank(world):
        with make(world, tmp_path, source=MemorySource(48)) as loader:
            batches = loader.evaluation(MemorySource(13, name="measured"))
            return [i for b in batches for i in b["sample_id"][b["valid"]].tolist()]

    for nodes in ([1, 1, 1, 1], [1, 1], [2, 1], [1]):
        ids = [i for ids in run_threads(thread_worlds(nodes), rank) for i in ids]
        assert sorted(ids) == list(range(13)), nodes


def test_it_may_have_fields_and_a_collate_of_its_own(tmp_path):
    with make(single_world(), tmp_path, fields={"label": Int("cls")}) as loader:
        fields = {"data": Bytes("bin")}
        other = loader.evaluation(MemorySource(23, name="o"), fields=fields, collate=lengths)
        batches = list(other)
        assert {frozenset(batch) for batch in loader} == {
            frozenset(["label", "weight", "sample_id", "slot"])
        }
    for batch in batches:
        ids = batch["sample_id"][batch["valid"]].tolist()
        assert batch["longest"] == max(len(payload(i)) for i in ids)


def test_its_errors_name_the_sample(tmp_path):
    def refuse(sample, rng):
        raise FieldError("no")

    with make(single_world(), tmp_path) as loader:
        evaluation = loader.evaluation(MemorySource(23, name="other"), transform=refuse)
        with pytest.raises(FieldError, match=r"^other: transform: sample \d+, epoch 0: no"):
            next(iter(evaluation))


def test_a_row_that_the_disk_damaged_is_read_from_the_source_again(tmp_path):
    with make(single_world(), tmp_path) as loader:
        source = MemorySource(23, name="other")
        evaluation = loader.evaluation(source)
        (heap,) = evaluation._session.pool.cache.directory.glob("heap-0.bin")
        data = bytearray(heap.read_bytes())
        data[0] ^= 1
        heap.write_bytes(data)
        staged = len(source.rows_read)
        rows = seen(evaluation)
        assert len(source.rows_read) == staged + 1
    # NumPy's bytes leave out zeros at the end.
    assert {i: row["data"] for i, row in rows.items()} == {
        i: payload(i).rstrip(b"\0") for i in range(23)
    }

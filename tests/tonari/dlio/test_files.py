"""Files as DLIO writes them, read sample by sample."""

from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image as Pillow

from dataio import Bytes, Loader, SourceError
from dataio.world import single_world
from tonari.dlio.files import open_files

NUM_FILES, PER_FILE = 6, 2


def write(file_format, path, number, rng):
    """Write one file as DLIO's generator of that format does; returns what each sample holds."""
    height = 8 + number
    if file_format in ("npz", "npy"):
        values = rng.integers(255, size=(height, 9, PER_FILE), dtype=np.uint8)
        if file_format == "npz":
            np.savez(path, x=values, y=[0] * PER_FILE)
        else:
            np.save(path, values)
        return [values[..., i].tobytes() for i in range(PER_FILE)]
    if file_format == "hdf5":
        parts = rng.integers(255, size=(2, PER_FILE, height, 9), dtype=np.uint8)
        with h5py.File(path, "w") as file:
            for name, part in zip(("records_0", "records_1"), parts, strict=True):
                file[name] = part
            file["labels"] = np.zeros(PER_FILE)
        return [parts[0, i].tobytes() + parts[1, i].tobytes() for i in range(PER_FILE)]
    pixels = rng.integers(255, size=(height, 9), dtype=np.uint8)
    Pillow.fromarray(pixels).save(path, file_format)
    return [path.read_bytes()]


@pytest.mark.parametrize("file_format", ["npz", "npy", "hdf5", "jpeg", "png"])
def test_each_sample_of_each_file_comes_once_and_whole(file_format, tmp_path):
    rng, written = np.random.default_rng(0), []
    names = [f"{tmp_path}/img_{i}_of_{NUM_FILES}.{file_format}" for i in range(NUM_FILES)]
    for number, name in enumerate(names):
        written += write(file_format, Path(name), number, rng)
    per_file = len(written) // NUM_FILES
    source, key = open_files(
        names[::-1], file_format, samples_per_file=per_file, world=single_world()
    )
    with Loader(
        source, batch_size=2, fields={"record": Bytes(key)}, cache=tmp_path / "cache"
    ) as loader:
        found: dict[int, bytes] = {}
        for batch in loader:
            found |= dict(zip(batch["sample_id"].tolist(), batch["record"], strict=True))
        assert loader.stats()["source_bytes"] > 0
    assert [found[i] for i in range(len(written))] == written


def test_another_file_is_another_source(tmp_path):
    paths = [tmp_path / f"{i}.npy" for i in range(3)]
    for path in paths:
        np.save(path, np.zeros((4, 4, 1)))

    def fingerprint():
        opened = open_files([*map(str, paths)], "npy", samples_per_file=1, world=single_world())
        return opened[0].fingerprint

    before = fingerprint()
    assert before == fingerprint()
    np.save(paths[1], np.zeros((4, 5, 1)))
    assert before != fingerprint()


def test_a_broken_file_is_named_with_its_cure(tmp_path):
    path = tmp_path / "img_0_of_1.npz"
    np.savez(path, other=np.zeros(3))
    source, key = open_files([str(path)], "npz", samples_per_file=1, world=single_world())
    with pytest.raises(SourceError, match=r"img_0_of_1\.npz, sample 0 of 1: .*generate the data"):
        list(source.read(np.array([0]), {"record": Bytes(key)}))


@pytest.mark.parametrize(
    ("files", "file_format", "words"),
    [
        ([], "npz", "the list of files is empty.*generate_data=True"),
        (["a.csv"], "csv", "the files are csv, expected npz, npy, hdf5, jpeg, png, tfrecord"),
    ],
)
def test_what_cannot_be_read_is_refused(files, file_format, words):
    with pytest.raises(SourceError, match=words):
        open_files(files, file_format, samples_per_file=1, world=single_world())

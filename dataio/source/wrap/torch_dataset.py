"""Any map-style dataset of torch as a source: each sample is asked for once, when it is staged."""

import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from dataio.base.checked import checked
from dataio.base.errors import FieldError, SourceError
from dataio.base.location import bare
from dataio.rows.fields import Field, Raw
from dataio.rows.rows import Rows
from dataio.source.base import check_ids
from dataio.source.row_block import RowBlock
from dataio.source.values import fields_of, named_values, raw_value

NUM_LOOKED_AT = 4
"""Samples that go into the fingerprint."""


class MapDataset(Protocol):
    """What torch calls a map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


@checked
class DatasetSource:
    """A `Source` of the samples of a dataset, as it returns them.

    A field's key is a sample's own key, or, where samples are tuples, the position: "0", "1" ...
    Values may be numbers, bytes, str, tensors, arrays, and Pillow's images, which become pixels.
    Every rank must be given the same dataset, without random transforms: hand these to the loader.

    Args:
        dataset: Has ``len(dataset)`` and ``dataset[i]``.
        name: Names the cache; defaults to the dataset's class and fingerprint.
        version: Whatever changes when the samples do: of the samples themselves only a few are
            looked at.

    Raises:
        TypeError: If it is an iterable-style dataset.
    """

    made_as = "DatasetSource"
    total_bytes = 0

    def __init__(self, dataset: MapDataset, *, name: str | None = None, version: str = "") -> None:
        _check_map_style(dataset)
        self._is_named = name is not None
        name = bare(name) if name is not None else type(dataset).__qualname__
        self._label = name if "://" in name else f"dataset://{name}"
        self.num_samples = len(dataset)
        self.bytes_read = 0
        self.shard_starts = np.zeros(1, np.int64)
        self._dataset = dataset
        self._version = version
        if self.num_samples < 1:
            raise SourceError(
                f"{self._label}: the dataset is empty, expected at least one sample; check its "
                "arguments"
            )

    @property
    def name(self) -> str:
        return self._label if self._is_named else f"{self._label}-{self.fingerprint}"

    @cached_property
    def fingerprint(self) -> str:
        """Hash version, length, and the first, the last and some samples between."""
        marks = [type(self._dataset).__qualname__, self._version, str(self.num_samples)]
        looked_at = np.linspace(0, self.num_samples - 1, NUM_LOOKED_AT).astype(np.int64)
        for number in np.unique(looked_at).tolist():
            digests = [_digest(self._sample(number)) for _ in range(2)]
            if digests[0] != digests[1]:
                raise SourceError(
                    f"{self._label}: sample {number} is another one each time it is asked for, "
                    "expected the same; take random transforms out of the dataset and give them "
                    "to the loader: Loader(transform=...)"
                )
            marks.append(digests[0])
        return xxhash.xxh3_64_hexdigest("\n".join(marks).encode())

    def class_names(self, key: str) -> list[str] | None:
        """Name the classes of a feature of Hugging Face, or of a dataset of torchvision."""
        dataset: object = self._dataset
        while type(dataset).__name__ == "Subset":
            dataset = getattr(dataset, "dataset", None)
        features = getattr(dataset, "features", None)
        if isinstance(features, Mapping):
            names = getattr(features.get(key), "names", None)
        else:  # samples are (image, class) there
            names = getattr(dataset, "classes", None) if key == "1" else None
        return [str(name) for name in names] if isinstance(names, (list, tuple)) else None

    def read(self, sample_ids: NDArray[np.int64], fields: Mapping[str, Field]) -> Iterator[Rows]:
        """Read samples; see `Source.read`."""
        check_ids(self, sample_ids)
        return self._read(sample_ids, fields)

    def _read(self, sample_ids: NDArray[np.int64], fields: Mapping[str, Field]) -> Iterator[Rows]:
        block = RowBlock(fields)
        for number in sample_ids.tolist():
            where = f"{self._label}: sample {number}"
            raw = fields_of(self._sample(number), fields, where)
            block.add(number, raw, where)
            self.bytes_read += sum(_num_bytes(value) for value in raw.values())
            if block.full:
                yield block.take()
        if len(block):
            yield block.take()

    def _sample(self, number: int) -> dict[str, object]:
        try:
            sample = self._dataset[number]
        except Exception as error:
            raise SourceError(
                f"{self._label}: dataset[{number}] failed ({type(error).__name__}: {error}), "
                f"expected sample {number} of {self.num_samples}; repair the dataset, or leave "
                "the sample out with torch.utils.data.Subset"
            ) from error
        return named_values(sample)


def _check_map_style(dataset: object) -> None:
    # Whoever holds one of torch's iterable datasets has imported it.
    torch_data = sys.modules.get("torch.utils.data")
    iterable = torch_data is not None and isinstance(dataset, torch_data.IterableDataset)
    if iterable:
        raise TypeError(
            f"DatasetSource: {type(dataset).__name__} is iterable-style: its samples have no "
            "numbers; expected a map-style dataset with len(dataset) and dataset[i]. Hand a "
            "pipeline of webdataset to the loader itself; write the samples of others with "
            "pyarrow.parquet.write_table, or wrap list(dataset) where they fit in memory"
        )


def _digest(sample: Mapping[str, object]) -> str:
    digest = xxhash.xxh3_64()
    for key, value in sample.items():
        try:
            raw = raw_value(value, key)
        except FieldError:
            # Not what a field can be read from: its type is all that matters.
            raw = type(value).__qualname__
        if isinstance(raw, str):
            raw = raw.encode(errors="surrogatepass")
        if not isinstance(raw, (bytes, memoryview)):
            array = np.asarray(raw)
            raw = f"{array.dtype.str} {array.shape} ".encode() + array.tobytes()
        digest.update(f"{key} {len(raw)} ".encode())
        digest.update(bytes(raw))
    return digest.hexdigest()


def _num_bytes(value: Raw) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    return len(value) if isinstance(value, (bytes, memoryview, str)) else 8
